"""Models found in a repository, and their faults."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.models.repository import FoundModel, Repository, compute_checksum, read_signature
from tests.support.models import Value, add_version, digits, make_model, settings_for


def scan(path: Path) -> list[FoundModel]:
    """All models of a repository."""
    return Repository(path, settings_for(path)).scan()


def selected(path: Path) -> list[str]:
    """The selected versions of the one model there."""
    [model] = scan(path)
    assert not model.fault
    return [each.version for each in model.versions]


@pytest.mark.parametrize(
    ("config", "versions"),
    [
        ("", ["10"]),
        ('versions = "latest"', ["10"]),
        ('versions = "all"', ["2", "9", "10"]),
        ("versions = [9, 2]", ["2", "9"]),
    ],
    ids=["default", "latest", "all", "some"],
)
def test_versions_are_selected_by_number(tmp_path: Path, config: str, versions: list[str]) -> None:
    """Numbers are compared as numbers; the latest is the default."""
    for number in (2, 9, 10):
        add_version(tmp_path, "digits", number, digits(), config)
    assert selected(tmp_path) == versions


def test_directories_without_version_number_are_ignored(tmp_path: Path) -> None:
    """A version's name is a positive number without leading zeros."""
    add_version(tmp_path, "digits", 1, digits())
    for name in ("assets", "0", "02", "3.1", "__pycache__"):
        (tmp_path / "digits" / name).mkdir()
    assert selected(tmp_path) == ["1"]


def test_hidden_directories_and_files_are_ignored(tmp_path: Path) -> None:
    """`.git` and a README may lie beside the models."""
    add_version(tmp_path, "digits", 1, digits())
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").touch()
    assert [model.name for model in scan(tmp_path)] == ["digits"]


def test_broken_model_leaves_others_listed(tmp_path: Path) -> None:
    """Each model has its own fault."""
    add_version(tmp_path, "bad", 1, digits(), "colour = 1")
    add_version(tmp_path, "good", 1, digits())
    bad, good = scan(tmp_path)
    assert "colour: there is no such key" in bad.fault
    assert (good.name, good.fault) == ("good", "")


@pytest.mark.parametrize(
    ("name", "fault"),
    [("empty", "expected a version, a directory such as 1, got none"), ("a b", "got 'a b'")],
)
def test_directory_without_model_has_fault(tmp_path: Path, name: str, fault: str) -> None:
    """A model needs a name that fits into a header, and a version."""
    (tmp_path / name).mkdir()
    [model] = scan(tmp_path)
    assert fault in model.fault


def test_directory_with_name_of_no_model_is_not_listed(tmp_path: Path) -> None:
    """Nobody can load it, and `lost+found` at the root of a disk cannot even be read."""
    add_version(tmp_path, "good", 1, digits())
    (tmp_path / "lost+found").mkdir()
    assert Repository(tmp_path, Settings()).list_versions() == {"good": [1]}


def test_selected_version_that_is_missing_is_fault(tmp_path: Path) -> None:
    """A list of versions names existing ones."""
    add_version(tmp_path, "digits", 1, digits(), "versions = [1, 4]")
    [model] = scan(tmp_path)
    assert "versions: expected some of [1], got [4]" in model.fault


def test_missing_repository_is_refused(tmp_path: Path) -> None:
    """The path is told, and the setting that has it."""
    with pytest.raises(ConfigurationError, match=r"models\.repository: .*none: No such file"):
        scan(tmp_path / "none")


def test_version_without_its_file_cannot_be_opened(tmp_path: Path) -> None:
    """The message says where the model was expected."""
    (tmp_path / "digits" / "1").mkdir(parents=True)
    [model] = scan(tmp_path)
    assert model.config is not None
    with pytest.raises(ConfigurationError, match=r"1/model\.onnx: expected the model here"):
        read_signature(model.versions[0], model.config)


@pytest.mark.parametrize("config", ["", 'transform = "python"'])
def test_version_with_more_inputs_than_request_can_have_needs_transform(
    tmp_path: Path, config: str
) -> None:
    """It would be ready, and refuse every request with tensors; a transform makes any number."""
    names = [f"x{number}" for number in range(65)]
    inputs: list[Value] = [(name, TensorProto.FLOAT, ["batch", 1]) for name in names]
    outputs: list[Value] = [("y", TensorProto.FLOAT, ["batch", 1])]
    model_file = make_model([helper.make_node("Sum", names, ["y"])], inputs, outputs)
    add_version(tmp_path, "wide", 1, model_file, config)
    [model] = scan(tmp_path)
    assert model.config is not None
    if config:
        assert len(read_signature(model.versions[0], model.config).inputs) == 65
    else:
        with pytest.raises(ConfigurationError, match=r"inputs: expected at most 64, .*, got 65"):
            read_signature(model.versions[0], model.config)


def test_version_stamp_changes_with_file(tmp_path: Path) -> None:
    """A change of the version, or of a file beside it, is seen without reading the content."""
    directory = add_version(tmp_path, "digits", 1, digits())
    before = scan(tmp_path)[0].versions[0].stamp
    assert scan(tmp_path)[0].versions[0].stamp == before
    (tmp_path / "digits" / "model.toml").write_text("max_batch_size = 4", encoding="utf-8")
    changed = scan(tmp_path)[0].versions[0].stamp
    (directory / "labels.txt").touch()
    assert len({before, changed, scan(tmp_path)[0].versions[0].stamp}) == 3


def test_checksum_is_over_names_lengths_and_contents(tmp_path: Path) -> None:
    """The definition, written out; Python's caches do not count."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"second")
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "model.pyc").write_bytes(b"not counted")
    expected = hashlib.sha256(
        b"a\0" + (5).to_bytes(8, "big") + b"first" + b"b/x\0" + (6).to_bytes(8, "big") + b"second"
    )
    assert compute_checksum(tmp_path) == f"sha256:{expected.hexdigest()}"


def test_version_with_its_checksum_is_opened(tmp_path: Path) -> None:
    """The signature is read when the files are the right ones."""
    directory = add_version(tmp_path, "digits", 1, digits())
    config = tmp_path / "digits" / "model.toml"
    config.write_text(f'checksum = "{compute_checksum(directory)}"', encoding="utf-8")
    [model] = scan(tmp_path)
    assert model.config is not None
    assert read_signature(model.versions[0], model.config).inputs[0].name == "pixels"


def test_version_with_another_checksum_is_refused(tmp_path: Path) -> None:
    """Both checksums are told."""
    add_version(tmp_path, "digits", 1, digits(), f'checksum = "sha256:{"0" * 64}"')
    [model] = scan(tmp_path)
    assert model.config is not None
    with pytest.raises(ConfigurationError, match=r"checksum: expected sha256:000.*, got sha256:"):
        read_signature(model.versions[0], model.config)


def test_selection_is_that_of_configuration_with_overrides(tmp_path: Path) -> None:
    """Unknown models, and overrides that make the configuration invalid, are refused."""
    for number in (1, 2, 3):
        add_version(tmp_path, "digits", number, digits(), 'versions = "latest:2"')
    repository = Repository(tmp_path, settings_for(tmp_path))
    assert repository.select("digits", {}) == [2, 3]
    assert repository.select("digits", {"versions": "all"}) == [1, 2, 3]
    with pytest.raises(ConfigurationError, match="model: expected one of the repository, digits"):
        repository.select("../digits", {})
    with pytest.raises(ConfigurationError, match="overrides: max_batch: "):
        repository.select("digits", {"max_batch": 3})
