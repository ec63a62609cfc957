"""Pre- and postprocessing from `model.toml`: the request-side signature and the model's own.

Requests may carry an input in a smaller datatype or another channel layout than the model's, and
may get softmax, the top classes or their labels instead of a raw output. Ingest checks requests
against the resulting signature; the backend converts one into the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.device.widening import TARGETS, Widening, source_shape
from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig, Preprocess
from headrace.models.processing import Appendix, plan_appendix, read_labels, with_appendix
from headrace.models.signature import Signature, TensorSpec, make_signature

_CHANNELS = {None: 0, "NCHW": 1, "NHWC": 3}
"""Axis of the channels, by layout."""


class Adaptation(NamedTuple):
    """The model-side and the request-side signature of a model, and the conversions between them.

    Attributes:
        own: inputs and outputs of the session, including what is appended to the graph.
        signature: inputs and outputs that requests see.
        widenings: input conversions, by input name.
        appendix: nodes appended to the graph; None if there are none.
    """

    own: Signature
    signature: Signature
    widenings: Mapping[str, Widening]
    appendix: Appendix | None


def adapt(found: Signature, config: ModelConfig, directory: Path) -> Adaptation:
    """Apply `preprocess`, `postprocess` and `labels`.

    Args:
        found: the signature as the model's file says it.
        config: of the model.
        directory: of the version.

    Raises:
        ConfigurationError: they do not fit the model; each message names the key.
    """
    own, seen, appendix = found, found, None
    if config.postprocess:
        labels = read_labels(directory, config.labels) if config.labels else ()
        appendix = plan_appendix(found, config.postprocess, config.postprocess_output, labels)
        own = with_appendix(found, appendix._replace(labels=()))
        seen = with_appendix(found, appendix)
    widenings = _plan_widenings(found, config.preprocess)
    if widenings:
        inputs = [_as_it_travels(spec, widenings.get(spec.name)) for spec in found.inputs]
        seen = make_signature(inputs, seen.outputs, utf8=seen.utf8, precision=seen.precision)
    return Adaptation(own, seen, widenings, appendix)


def _plan_widenings(found: Signature, preprocess: Mapping[str, Preprocess]) -> dict[str, Widening]:
    specs = {spec.name: spec for spec in found.inputs}
    if unknown := preprocess.keys() - specs.keys():
        raise ConfigurationError(
            f"preprocess: expected some of {', '.join(specs)}, got {', '.join(sorted(unknown))}"
        )
    return {name: _widening(specs[name], asked) for name, asked in preprocess.items()}


def _widening(spec: TensorSpec, asked: Preprocess) -> Widening:
    where = f"preprocess.{spec.name}"
    if spec.datatype not in TARGETS:
        raise ConfigurationError(
            f"{where}: expected an input of {', '.join(TARGETS)}, got {spec.datatype}"
        )
    if asked.layout and len(spec.shape) != 4:
        raise ConfigurationError(f"{where}.layout: expected 4 dimensions, got {list(spec.shape)}")
    source, target = _CHANNELS[asked.layout], _CHANNELS[asked.model_layout]
    channels = spec.shape[target] if target else 1
    for key, values in (("scale", asked.scale), ("offset", asked.offset)):
        if len(values) not in (1, channels):
            raise ConfigurationError(
                f"{where}.{key}: expected 1 value or one for each of {channels} channels, "
                f"got {len(values)}"
            )
    return Widening(asked.datatype, spec.datatype, asked.scale, asked.offset, source, target)


def _as_it_travels(spec: TensorSpec, widening: Widening | None) -> TensorSpec:
    if widening is None:
        return spec
    order = source_shape(widening, tuple(range(len(spec.shape))))
    return TensorSpec(
        spec.name,
        widening.source,
        tuple(spec.shape[axis] for axis in order),
        tuple(spec.dimensions[axis] for axis in order) if spec.dimensions else (),
    )
