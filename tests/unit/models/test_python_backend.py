"""Models written in Python."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.backends.port import ModelFailed, WarmUp
from headrace.models.backends.python import PythonBackend, python_signature
from headrace.models.config import make_model_config
from headrace.models.user_code import StillImporting
from tests.unit.models.requests import spec

Make = Callable[..., PythonBackend]

INPUTS = 'inputs = [("x", "FP32", (-1, 2))]'
OUTPUTS = 'outputs = [("y", "FP32", (-1,))]'


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a backend of the body of a class `Model`; keywords are lines of `model.toml`."""

    def of(body: str, **values: Any) -> PythonBackend:
        path = tmp_path / "model.py"
        head = "import numpy as np\n\nclass Model:\n"
        path.write_text(head + textwrap.indent(textwrap.dedent(body), "    "), encoding="utf-8")
        config = make_model_config({"backend": "python", **values}, make_settings({}))
        return PythonBackend(tmp_path, config, python_signature(path, config))

    return of


def model(run: str = 'return {"y": inputs["x"].sum(axis=1)}', more: str = "pass") -> str:
    """The body of a class with this `run`, and something more."""
    return f"{INPUTS}\n{OUTPUTS}\n{more}\ndef run(self, inputs):\n    {run}\n"


def test_python_signature_comes_from_class(make: Make) -> None:
    """`inputs` and `outputs` of the class are the signature."""
    signature = make(model()).signature
    assert signature.inputs == (spec("x", "FP32", [-1, 2]),)
    assert (signature.outputs, signature.batched) == ((spec("y", "FP32", [-1]),), True)


def test_signature_of_configuration_needs_no_class(make: Make) -> None:
    """With a signature in `model.toml` the code is not run before it is loaded."""
    backend = make(
        "raise RuntimeError('too early')",
        inputs=[{"name": "a", "datatype": "BYTES", "shape": [-1]}],
        outputs=[{"name": "b", "datatype": "INT64", "shape": [-1]}],
    )
    assert [each.name for each in backend.signature.inputs] == ["a"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", r"Model\.inputs: expected a list of \(name, datatype, shape\)"),
        ("inputs = [('x', 'FP32')]", r"Model\.inputs: expected \(name, datatype, shape\) each"),
        ("inputs = [('x', 'float', (-1,))]", r"Model\.inputs: .*datatype: expected one of BOOL"),
        (
            "inputs = [{'name': 'x', 'datatype': 'FP32', 'shape': [-1, 3]}]",
            r"Model\.inputs: expected \(name, datatype, shape\) each, got \{.*'name': 'x'",
        ),
    ],
    ids=["none", "incomplete", "datatype", "table"],
)
def test_wrong_signature_is_refused(make: Make, body: str, message: str) -> None:
    """The message says where it was expected and how it looks."""
    with pytest.raises(ConfigurationError, match=message):
        make(body)


def test_python_model_run_returns_outputs(make: Make) -> None:
    """The class is made once, loaded once, and run for each batch."""
    backend = make(
        model('return {"y": inputs["x"].sum(axis=1) + self.bias}', "def load(self): self.bias = 1")
    )
    backend.load()
    outputs = backend.run({"x": np.ones((3, 2), np.float32)})
    assert outputs["y"].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("return None", "expected a dict of arrays from Model.run, got NoneType"),
        ("return {'y': [1.0]}", "expected a dict of arrays from Model.run, got 'y': list"),
        ("return {'z': inputs['x']}", "outputs: expected y, got z"),
        ("return {'y': inputs['x'].sum(axis=1).astype('f8')}", "y: expected FP32, got FP64"),
        ("return {'y': inputs['x'].astype('c8')[0]}", "y: expected FP32, got complex64"),
        ("return {'y': inputs['x'].sum()[None]}", r"y: expected 3 rows in dimension 0.*\[1\]"),
        ("return {'y': np.array(1, 'f4')}", r"y: expected 3 rows in dimension 0.*\[\]"),
        ("return {'y': inputs['x']}", r"y: expected shape \[-1\], got \[3, 2\]"),
    ],
    ids=["none", "list", "name", "datatype", "no datatype", "rows", "scalar", "shape"],
)
def test_python_outputs_breaking_signature_are_failure(make: Make, run: str, message: str) -> None:
    """The output is named, with what was expected."""
    backend = make(model(run))
    backend.load()
    with pytest.raises(ModelFailed, match=message):
        backend.run({"x": np.ones((3, 2), np.float32)})


def test_numbers_are_read_only_for_python_model(make: Make) -> None:
    """A run may be repeated with the same arrays: after a transient error, or in half a batch."""
    backend = make(model("x = inputs['x']; x *= 2; return {'y': x[:, 0]}"))
    backend.load()
    given = np.ones((1, 2), np.float32)

    with pytest.raises(ValueError, match="read-only"):
        backend.run({"x": given})

    assert given.tolist() == [[1, 1]]
    assert given.flags.writeable


def test_texts_that_python_model_changes_are_the_same_in_next_run(make: Make) -> None:
    """The probe repeats a run with the same arrays, and compares what it gets."""
    body = model("x = inputs['x']; x += b'!'; return {'y': x[:, 0]}").replace("FP32", "BYTES")
    backend = make(body)
    backend.load()
    given = np.full((1, 2), b"a", dtype=object)
    outputs = [backend.run({"x": given})["y"].tolist() for _ in range(2)]
    assert outputs == [[b"a!"], [b"a!"]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("def load(self): raise OSError('no weights')", "OSError: no weights"),
        ("def __init__(self): 1 / 0", "ZeroDivisionError"),
    ],
    ids=["load", "constructor"],
)
def test_python_model_that_cannot_be_loaded_is_refused(make: Make, more: str, message: str) -> None:
    """An exception of a user's code is reported with the file."""
    with pytest.raises(ConfigurationError, match=rf"model\.py: {message}"):
        make(model(more=more)).load()


def test_model_without_run_is_refused(make: Make) -> None:
    """A class that cannot run is found at load."""
    with pytest.raises(ConfigurationError, match=r"expected a method run\(inputs\), got none"):
        make(f"{INPUTS}\n{OUTPUTS}").load()


def test_warm_up_of_python_model_replaces_default(make: Make) -> None:
    """A model that knows better what it needs is left to it."""
    backend = make(model("raise ValueError", "def warm_up(self): self.warm = True"))
    backend.load()
    assert backend.warm_up() == WarmUp()


def test_default_warm_up_finds_that_larger_batches_fail(make: Make) -> None:
    """If one row runs and two do not, batching is off, for every backend."""
    backend = make(model("assert len(inputs['x']) < 2; return {'y': inputs['x'][:, 0]}"))
    backend.load()
    assert backend.warm_up().batching_fault.startswith("a run of 2 rows failed")


def test_cancel_is_passed_to_python_model(make: Make) -> None:
    """A model with a `cancel` of its own is told."""
    backend = make(
        model("return {'y': np.full(1, self.n, 'f4')}", "n = 0\ndef cancel(self): self.n = 1")
    )
    backend.load()
    backend.cancel()
    assert backend.run({"x": np.ones((1, 2), np.float32)})["y"].tolist() == [1.0]


def test_output_of_texts_with_something_else_is_failure(make: Make) -> None:
    """An object array holds anything; the element is named."""
    body = model("return {'y': np.array([b'a', 'b', 3], dtype=object)}")
    backend = make(body.replace('"y", "FP32"', '"y", "BYTES"'))
    backend.load()
    with pytest.raises(ModelFailed, match=r"y: expected bytes or str, got int at element 2"):
        backend.run({"x": np.ones((3, 2), np.float32)})


@pytest.mark.parametrize(
    "texts",
    [
        "np.array(['a', 'bb', 'c'])",
        "np.array([b'a', b'bb', b'c'])",
        "np.array(['a', 'bb', 'c'], 'O')",
        "np.array(['a', 'bb', 'c'], np.dtypes.StringDType())",
    ],
    ids=["str of fixed width", "bytes of fixed width", "str", "str of any width"],
)
def test_texts_of_python_model_are_bytes_objects(make: Make, texts: str) -> None:
    """What texts are compared with, in golden samples and in the probe, are bytes objects too."""
    body = model(f"return {{'y': {texts}}}")
    backend = make(body.replace('"y", "FP32"', '"y", "BYTES"'))
    backend.load()
    found = backend.run({"x": np.ones((3, 2), np.float32)})["y"]
    assert found.dtype == object
    assert found.tolist() == [b"a", b"bb", b"c"]


def test_masked_output_of_python_model_is_its_data(make: Make) -> None:
    """Arrays of other classes than NumPy's own are written as what is in their memory."""
    backend = make(model("return {'y': np.ma.masked_array(inputs['x'][:, 0], mask=True)}"))
    backend.load()
    found = backend.run({"x": np.ones((3, 2), np.float32)})["y"]
    assert found.tobytes() == np.ones(3, np.float32).tobytes()


def test_unload_is_passed_to_python_model(make: Make, tmp_path: Path) -> None:
    """A model with an `unload` of its own can close what it has opened."""
    backend = make(model(more=f"def unload(self): open('{tmp_path}/closed', 'w').close()"))
    backend.load()
    backend.unload()
    assert (tmp_path / "closed").exists()


def test_cancel_that_raises_is_ignored(make: Make) -> None:
    """It is called by the event loop, which a user's code must not end."""
    backend = make(model(more="def cancel(self): raise SystemExit"))
    backend.load()
    backend.cancel()
    assert backend.run({"x": np.ones((1, 2), np.float32)})["y"].tolist() == [2.0]


@pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt", "BaseException('no')"])
def test_import_that_raises_anything_is_refused(tmp_path: Path, raised: str) -> None:
    """Nothing that a user's code raises ends the process."""
    path = tmp_path / "model.py"
    path.write_text(f"raise {raised}", encoding="utf-8")
    config = make_model_config({"backend": "python"}, make_settings({}))
    with pytest.raises(ConfigurationError, match=rf"model\.py: {raised.partition('(')[0]}"):
        python_signature(path, config)


def test_endless_import_is_refused_after_max_load_s(tmp_path: Path) -> None:
    """It is interrupted then, where it is written in Python."""
    path = tmp_path / "model.py"
    path.write_text("while True: pass", encoding="utf-8")
    config = make_model_config({"backend": "python", "max_load_s": 0.05}, make_settings({}))
    with pytest.raises(
        StillImporting, match=r"expected the import to end within max_load_s = 0\.05 s"
    ) as caught:
        python_signature(path, config)
    caught.value.thread.join(10)
    assert not caught.value.thread.is_alive()


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("headrace.errors", "Fatal"),
        ("headrace.errors", "HeadraceError"),
        ("headrace.services.executor.instance", "DeadlinePassed"),
        ("headrace.services.executor.instance", "CutOffError"),
    ],
)
def test_error_of_ours_raised_by_model_is_model_failure(
    make: Make, module: str, error: str
) -> None:
    """It would end the process, or repeat the run, which is not for a model to say."""
    backend = make(model(f"from {module} import {error}; raise {error}('no more')"))
    backend.load()
    with pytest.raises(ModelFailed, match=f"{error}: no more"):
        backend.run({"x": np.ones((1, 2), np.float32)})


@pytest.mark.parametrize("error", ["Fatal('no')", "Retriable('no')", "Rejected('INTERNAL', 'no')"])
def test_error_of_ours_raised_by_load_fails_the_version(make: Make, error: str) -> None:
    """Another version than this one goes on."""
    names = "Fatal, Rejected, Retriable"
    load = f"def load(self):\n    from headrace.errors import {names}\n    raise {error}"
    backend = make(model(more=load))
    with pytest.raises(ConfigurationError, match=rf"model\.py: {error.partition('(')[0]}: "):
        backend.load()


def test_refusal_with_parts_that_no_answer_holds_is_model_failure(make: Make) -> None:
    """A class of the model's own may lack what an answer needs."""
    backend = make(
        """
        inputs = [("x", "FP32", (-1, 2))]
        outputs = [("y", "FP32", (-1,))]

        def run(self, inputs):
            from headrace.errors import Rejected

            class Unfit(Rejected):
                def __init__(self):
                    self.code = "none of ours"

            raise Unfit
        """
    )
    backend.load()
    with pytest.raises(Rejected, match=r"MODEL_FAILED: Unfit: AttributeError: .*") as caught:
        backend.run({"x": np.ones((1, 2), np.float32)})
    assert caught.value.code is Code.MODEL_FAILED
