"""The backend for models written in Python: a class `Model` in `<version>/model.py`.

    class Model:
        inputs = [("pixels", "FP32", (-1, 64))]      # or in model.toml
        outputs = [("label", "INT64", (-1,))]

        def load(self): ...                          # optional
        def warm_up(self): ...                       # optional, in place of the usual runs
        def unload(self): ...                        # optional, before it is dropped
        def run(self, inputs): return {"label": inputs["pixels"].argmax(axis=1)}

A `Model` with a method `cancel` has it called from another thread when a run takes too long.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from headrace.config import describe_fault
from headrace.errors import (
    Code,
    ConfigurationError,
    NotLoadableHere,
    Rejected,
    Retriable,
    describe_error,
)
from headrace.models.backends.port import (
    Arrays,
    ModelFailed,
    WarmUp,
    check_outputs,
    check_shapes,
    check_texts,
)
from headrace.models.backends.warmup import warm_up
from headrace.models.config import DeclaredTensor, ModelConfig
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.models.user_code import (
    is_of_headrace,
    is_of_user_code,
    load_attribute,
    run_bounded,
    take_refusal,
)
from headrace.tuning import TUNING, ModelTuning


def python_signature(path: Path, config: ModelConfig) -> Signature:
    """Return the signature of a Python model: from its configuration, otherwise from its class.

    Raises:
        ConfigurationError: neither has one, or it is wrong.
    """
    if config.inputs:
        return make_signature(
            [tensor.spec() for tensor in config.inputs],
            [tensor.spec() for tensor in config.outputs],
        )
    return run_bounded(lambda: _signature_of_class(path), path, config.max_load_s)


def _signature_of_class(path: Path) -> Signature:
    model = load_attribute(path, "Model")
    inputs, outputs = _declared(path, model, "inputs"), _declared(path, model, "outputs")
    try:
        return make_signature(inputs, outputs)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _declared(path: Path, model: Any, kind: str) -> list[TensorSpec]:
    where = f"{path}: Model.{kind}"
    declared = getattr(model, kind, None)
    if not isinstance(declared, Iterable):
        raise ConfigurationError(
            f"{where}: expected a list of (name, datatype, shape), here or in model.toml, "
            f"got {declared!r}"
        )
    return [_declared_tensor(where, each) for each in declared]


def _declared_tensor(where: str, given: Any) -> TensorSpec:
    try:
        name, datatype, shape = given
        return DeclaredTensor(name=name, datatype=datatype, shape=tuple(shape)).spec()
    except ValidationError as error:
        faults = map(describe_fault, error.errors(include_url=False))
        reason = "; ".join(dict.fromkeys(faults))
    except (TypeError, ValueError) as error:
        reason = str(error)
    expected = "(name, datatype, shape) each"
    raise ConfigurationError(f"{where}: expected {expected}, got {reprlib.repr(given)}: {reason}")


class PythonBackend:
    """One instance of a model written in Python; see `headrace.models.backends.port.Backend`.

    Args:
        directory: directory of the version.
        config: configuration of the model.
        signature: signature of the version.
        tuning: tuning values of the warm-up.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        signature: Signature,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self._tuning = tuning
        self._directory = directory
        self._config = config
        self._signature = signature
        self._model: Any = None

    @property
    def signature(self) -> Signature:
        return self._signature

    def load(self) -> None:
        path = self._directory / "model.py"
        make = load_attribute(path, "Model")
        try:
            model = make()
            if hasattr(model, "load"):
                model.load()
        except ConfigurationError:
            raise
        except BaseException as error:  # a user's code may raise anything
            if not is_of_user_code(error):
                raise
            raise NotLoadableHere(f"{path}: {describe_error(error)}") from error
        if not callable(getattr(model, "run", None)):
            raise ConfigurationError(f"{path}: expected a method run(inputs), got none")
        self._model = model

    def use_signature(self, signature: Signature) -> None:
        self._signature = signature

    def warm_up(self) -> WarmUp:
        if not hasattr(self._model, "warm_up"):
            return warm_up(self.run, self._signature, self._config, self._directory, self._tuning)
        try:
            self._model.warm_up()
        except BaseException as error:  # a user's code may raise anything
            if not is_of_user_code(error):
                raise
            raise NotLoadableHere(f"{self._directory}: {describe_error(error)}") from error
        return WarmUp()

    def run(self, inputs: Arrays) -> Arrays:
        try:
            outputs = self._model.run(_protect(inputs))
        except Rejected as error:
            raise take_refusal(error, Code.MODEL_FAILED) from error
        except Retriable:
            raise
        except Exception as error:
            # Others of ours have effects, such as the end of the process or another run, which a
            # model must not decide.
            if is_of_headrace(error):
                raise ModelFailed(describe_error(error)) from error
            raise
        _require_arrays(outputs)
        rows = len(inputs[self._signature.inputs[0].name]) if self._signature.batched else 1
        check_outputs(self._signature, outputs, rows)
        check_shapes(self._signature, outputs)
        check_texts(self._signature, outputs)
        return {spec.name: _copy(outputs[spec.name]) for spec in self._signature.outputs}

    def cancel(self) -> None:
        # Called on the event loop, which a user's code must not end.
        with suppress(Exception, SystemExit):
            cancel = getattr(self._model, "cancel", None)
            if cancel is not None:
                cancel()

    def unload(self) -> None:
        model, self._model = self._model, None
        if hasattr(model, "unload"):
            model.unload()


def _protect(inputs: Arrays) -> dict[str, NDArray[Any]]:
    """Return the inputs with read-only numbers, and with arrays of `BYTES` that the model may
    change: the arrays may be those of a request or of the probe, and another run of it has to get
    the same ones.
    """
    protected = dict(inputs)
    for name, array in inputs.items():
        if array.dtype == object:
            protected[name] = array.copy()
        elif array.flags.writeable:
            protected[name] = array.view()
            protected[name].flags.writeable = False
    return protected


def _require_arrays(outputs: object) -> None:
    """Check what `Model.run` has returned. Raises `ModelFailed`."""
    expected = "outputs: expected a dict of arrays from Model.run, got "
    if not isinstance(outputs, dict):
        raise ModelFailed(f"{expected}{type(outputs).__name__}")
    for name, array in outputs.items():
        if not isinstance(array, np.ndarray):
            raise ModelFailed(f"{expected}{reprlib.repr(name)}: {type(array).__name__}")


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    """Return an output as a plain array of its own, since the model may reuse its arrays before
    they are written out. Texts become bytes objects, like those of other backends: the width of
    fixed-width texts would differ from batch to batch.
    """
    if array.dtype.kind not in "OSUT":
        return np.array(array, order="C")
    elements = np.asarray(array).ravel().tolist()
    texts = np.empty(len(elements), dtype=object)
    texts[:] = [one.encode() if isinstance(one, str) else one for one in elements]
    return texts.reshape(array.shape)
