"""Whose fault it is that a version cannot be opened or loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import helper

from headrace.errors import ConfigurationError, Fatal, NotLoadableHere
from headrace.models.backends.onnx_session import open_session
from headrace.models.config import make_model_config
from headrace.models.load_faults import is_fault_of_model, restore_fault
from headrace.models.memory import MemoryShort
from headrace.models.registry import Models
from headrace.models.stores.store import StoreUnavailable
from headrace.protocol.control import WantedModel
from tests.support.models import add_version, digits, settings_for


def caused_by(cause: Exception) -> ConfigurationError:
    """An error about a configuration, two steps away from its cause."""
    between = ConfigurationError("in between")
    between.__cause__ = cause
    error = ConfigurationError("at the end")
    error.__cause__ = between
    return error


OF_MODEL = {
    "configuration": ConfigurationError("inputs: expected x, got y"),
    "missing file": caused_by(FileNotFoundError()),
    "file for a directory": caused_by(NotADirectoryError()),
    "parser": caused_by(ValueError("no model")),
    "told by a child process": restore_fault("no model", is_of_model=True),
}
OF_PROCESS = {
    "budget": MemoryShort("models.memory_bytes: too little", 1),
    "memory": caused_by(MemoryError()),
    "device": caused_by(NotLoadableHere("memory of cuda:0: expected 2 MiB free, got 1 MiB")),
    "disk": caused_by(OSError(5, "Input/output error")),
    "permission": caused_by(PermissionError()),
    "store": caused_by(StoreUnavailable("no answer")),
    "package": caused_by(ImportError()),
    "broken device": Fatal("cuda:0"),
    "surprise": KeyError("x"),
    "told by a child process": restore_fault("out of memory", is_of_model=False),
}


@pytest.mark.parametrize("error", OF_MODEL.values(), ids=OF_MODEL)
def test_error_about_files_or_configuration_is_fault_of_model(error: Exception) -> None:
    """Whoever wrote them has to correct them, and no other process fares better."""
    assert is_fault_of_model(error)


@pytest.mark.parametrize("error", OF_PROCESS.values(), ids=OF_PROCESS)
def test_error_of_process_or_without_known_reason_is_no_fault_of_model(error: Exception) -> None:
    """An operator has to look at it: the same model may load elsewhere, or later."""
    assert not is_fault_of_model(error)


def write_garbage(version: Path) -> None:
    """Replace the model by a file that is none."""
    (version / "model.onnx").write_bytes(b"garbage")


def remove_file(version: Path) -> None:
    """Leave a directory without a model in it."""
    (version / "model.onnx").unlink()


def declare_other_input(version: Path) -> None:
    """Configure an input that the model does not have."""
    tensor = '[[inputs]]\nname = "pixel"\ndatatype = "FP32"\nshape = [-1, 64]\n'
    (version.parent / "model.toml").write_text(tensor)


def fail_at_import(version: Path) -> None:
    """Replace the model by one in Python whose code fails."""
    (version / "model.py").write_text("raise RuntimeError('out of memory')")
    (version.parent / "model.toml").write_text('backend = "python"')


def remove_version(version: Path) -> None:
    """Leave another version than the wanted one."""
    version.rename(version.parent / "2")


OPENED = {
    "garbage": (write_garbage, True),
    "no file": (remove_file, True),
    "other input": (declare_other_input, True),
    "code fails": (fail_at_import, False),
    "no version": (remove_version, False),
}
"""What is done to a version, and whether its load is rejected. The one who has a version loaded
looks first whether the repository has it: a process that lacks it has another repository.
"""


@pytest.mark.parametrize(("harm", "is_rejected"), OPENED.values(), ids=OPENED)
async def test_wanted_version_that_cannot_be_opened_says_whether_it_is_rejected(
    tmp_path: Path, harm: Callable[[Path], None], is_rejected: bool
) -> None:
    """Also when it is not opened again, since nothing of it has changed."""
    harm(add_version(tmp_path, "digits", 1, digits()))
    models = Models(settings_for(tmp_path))
    models.want({"digits": WantedModel(versions=["1"], default="1")})
    models.open()
    await models.reload(retry=False)
    [unready] = models.wanted.unready()
    assert (unready.is_under_way, unready.is_rejected) == (False, is_rejected)


@pytest.mark.parametrize("is_rejected", [True, False])
def test_version_that_fails_to_load_says_whether_it_is_rejected(
    tmp_path: Path, is_rejected: bool
) -> None:
    """As its executor says."""
    add_version(tmp_path, "digits", 1, digits())
    models = Models(settings_for(tmp_path), executes=True)
    models.want({"digits": WantedModel(versions=["1"], default="1")})
    models.open()
    [version] = models.catalog.versions()
    models.lifecycle.mark_failed(version, "why", is_rejected=is_rejected)
    [unready] = models.wanted.unready()
    assert unready.is_rejected == is_rejected


def test_version_that_breaks_callers_is_rejected(tmp_path: Path) -> None:
    """A setting of the model permits it."""
    other = digits()
    other.graph.input[0].name = other.graph.node[0].input[0] = "image"
    add_version(tmp_path, "digits", 1, digits())
    add_version(tmp_path, "digits", 2, other)
    models = Models(settings_for(tmp_path))
    wanted = WantedModel(versions=["1", "2"], default="2", compatible={"2": "1"})
    models.want({"digits": wanted})
    models.open()
    [unready] = models.wanted.unready()
    assert unready.is_rejected


def unknown_operator() -> onnx.ModelProto:
    """A model of an operator that a library may add to ONNX Runtime."""
    model = digits()
    model.graph.node[0].domain = "example.com"
    model.opset_import.append(helper.make_opsetid("example.com", 1))
    return model


@pytest.mark.parametrize(
    ("content", "is_of_model"),
    [(b"garbage", True), (unknown_operator().SerializeToString(), False)],
    ids=["garbage", "unknown operator"],
)
def test_error_of_onnx_runtime_is_fault_of_model_if_its_kind_says_so(
    tmp_path: Path, content: bytes, is_of_model: bool
) -> None:
    """Its general kinds are also those of a device that fails."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    config = make_model_config({}, settings_for(tmp_path))
    with pytest.raises(ConfigurationError) as refused:
        open_session(path, config, None, None)
    assert is_fault_of_model(refused.value) == is_of_model
