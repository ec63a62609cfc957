"""Requests whose fields are missing, of the wrong type or too long, in both forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.support.bad_records.building import (
    ABSENT,
    DATA,
    JSON_HEADERS,
    BadRecord,
    Headers,
    as_json,
    json_input,
    other_types,
    packed,
    packed_input,
    pixels,
    refused,
)


class _Form(NamedTuple):
    """MessagePack or JSON: how a request, and one with another input, are written."""

    name: str
    headers: Headers
    request: Callable[..., bytes]
    with_input: Callable[..., bytes]
    data: Any


_FORMS = (
    _Form("MessagePack", (), packed, packed_input, DATA),
    _Form("JSON", JSON_HEADERS, as_json, json_input, [0.0] * 64),
)


def fields() -> Iterator[BadRecord]:
    """All faults of fields, in MessagePack and in JSON."""
    for form in _FORMS:
        for faults in (_texts(form), _lists(form), _inputs(form), _outputs(form)):
            for name, value, fragment in faults:
                yield refused(f"{name} ({form.name})", value, fragment, form.headers)


_Faults = Iterator[tuple[str, bytes, str]]


def _texts(form: _Form) -> _Faults:
    yield "no model", form.request(model_name=ABSENT), "model_name: "
    for field in ("model_name", "model_version", "id"):
        optional = () if field == "model_name" else ("nil",)
        for kind, value in other_types("a string", *optional):
            yield f"{field} is {kind}", form.request(**{field: value}), f"{field}: "
        yield f"{field} is too long", form.request(**{field: "x" * 257}), f"{field}: "


def _lists(form: _Form) -> _Faults:
    for kind, value in other_types("a list"):
        yield f"inputs is {kind}", form.request(inputs=value), "inputs: "
    for kind, value in other_types("a list", "nil"):
        yield f"outputs is {kind}", form.request(outputs=value), "outputs: "
    for kind, value in other_types("a map", "nil"):
        yield f"parameters is {kind}", form.request(parameters=value), "parameters: "
        where = "inputs[0].parameters: "
        yield f"an input's parameters is {kind}", form.with_input(parameters=value), where
    many = {str(number): number for number in range(65)}
    yield "too many parameters", form.request(parameters=many), "parameters: "
    yield "a list as a parameter", form.request(parameters={"a": [1]}), "parameters"
    yield "null as a parameter", form.request(parameters={"a": None}), "parameters"
    for name, value in {
        "timeout": 1000, "priority": 1, "sequence_id": "mine", "sequence_start": True,
        "sequence_end": True, "binary_data_output": True,
    }.items():  # fmt: skip
        asked = form.request(parameters={"mine": 1, name: value})
        yield f"the parameter {name}", asked, f"parameters.{name}: expected none"
    for name, value in {"shared_memory_region": "mine", "binary_data_size": 256}.items():
        asked = form.with_input(parameters={name: value})
        yield f"an input's parameter {name}", asked, f"inputs[0].parameters.{name}: expected none"
    for name, value in {"classification": 3, "binary_data": True}.items():
        asked = form.request(outputs=[{"name": "label", "parameters": {name: value}}])
        yield f"an output's parameter {name}", asked, f"outputs[0].parameters.{name}: expected none"
    long = {"x" * 257: 1}
    yield "a parameter with too long a name", form.request(parameters=long), "parameters (a key)"


def _inputs(form: _Form) -> _Faults:
    for kind, value in other_types("a map"):
        yield f"an input is {kind}", form.request(inputs=[value]), "inputs[0]: "
    for field in ("name", "datatype", "shape", "data"):
        where = f"inputs[0].{field}: "
        yield f"an input without {field}", form.with_input(**{field: ABSENT}), where
    for kind, value in other_types("a string"):
        yield f"an input's name is {kind}", form.with_input(name=value), "inputs[0].name: "
        where = "inputs[0].datatype: "
        yield f"an input's datatype is {kind}", form.with_input(datatype=value), where
    for kind, value in other_types("a list"):
        yield f"an input's shape is {kind}", form.with_input(shape=value), "inputs[0].shape: "
    for kind, value in other_types("an integer"):
        where = "inputs[0].shape[1]: "
        yield f"a dimension is {kind}", form.with_input(shape=[1, value]), where
    good = pixels(form.data)
    extra = pixels(form.data, name="mask")
    yield from (
        ("no inputs field", form.request(inputs=ABSENT), "inputs: "),
        ("no input", form.request(inputs=[]), "inputs: "),
        ("too many inputs", form.request(inputs=[good] * 65), "inputs: "),
        ("an input twice", form.request(inputs=[good, good]), "inputs[1].name: "),
        ("an input too many", form.request(inputs=[good, extra]), "inputs[1].name"),
        ("the wrong input", form.request(inputs=[extra]), "inputs[0].name"),
        ("an input with an empty name", form.with_input(name=""), "inputs[0].name: "),
        ("an input with too long a name", form.with_input(name="x" * 257), "inputs[0].name: "),
        ("an input's name in capitals", form.with_input(name="PIXELS"), "inputs[0].name"),
    )


def _outputs(form: _Form) -> _Faults:
    label = {"name": "label"}
    for kind, value in other_types("a map"):
        yield f"an output is {kind}", form.request(outputs=[value]), "outputs[0]: "
    for kind, value in other_types("a string"):
        named = [{"name": value}]
        yield f"an output's name is {kind}", form.request(outputs=named), "outputs[0].name: "
    yield from (
        ("an unknown output", form.request(outputs=[{"name": "logits"}]), "outputs[0].name"),
        ("an output twice", form.request(outputs=[label, label]), "outputs[1].name"),
        ("an output without a name", form.request(outputs=[{}]), "outputs[0].name: "),
        ("an output with an empty name", form.request(outputs=[{"name": ""}]), "outputs[0].name: "),
        ("too many outputs", form.request(outputs=[label] * 257), "outputs: "),
    )
