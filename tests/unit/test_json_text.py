"""Tensors whose JSON is converted in parts of its text."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import Rejected
from headrace.protocol.codec.json_data import data_to_bytes, text_to_bytes

MANY = 1000


def refusal(datatype: str, shape: list[int], text: bytes, located_values: int) -> str:
    """The message with which a text is refused that is converted in small parts."""
    with pytest.raises(Rejected) as refused:
        text_to_bytes(datatype, shape, text, None, "x", 16, located_values)
    return refused.value.message


@pytest.mark.parametrize("datatype", ["FP32", "INT8", "BOOL", "BYTES"])
@pytest.mark.parametrize("item", [b"[]", b"{}", b"[[1]]", b'{"a":[1]}', b"[1,2]", b'["],[",1]'])
@pytest.mark.parametrize("shape", [[MANY], [MANY, 1], [MANY, 1, 1, 1], [0], [2]])
def test_many_values_of_other_nesting_are_refused_without_being_made(
    datatype: str, item: bytes, shape: list[int]
) -> None:
    """Each would be a Python object, with the interpreter held; a few are, to say where."""
    text = b"[%b]" % b",".join([item] * MANY)
    message = refusal(datatype, shape, text, MANY)

    assert message == f"x.data: expected an array of shape {shape}, flat or nested, got another one"
    assert refusal(datatype, shape, text, 10 * MANY) != message


def test_number_of_too_many_elements_is_told_without_making_them() -> None:
    """The commas are counted."""
    text = b"[%b]" % b",".join([b'","'] * MANY)

    expected = "x.data: expected 2 elements for shape [1, 2], got 1000"
    assert refusal("FP32", [1, 2], text, 0) == refusal("FP32", [1, 2], text, MANY) == expected


@pytest.mark.parametrize("shape", [[3, 0], [3, 0, 5], [0], [0, 3]])
def test_text_of_empty_tensor_is_accepted(shape: list[int]) -> None:
    """Nested like its shape, or just empty."""
    nested = b"[%b]" % b",".join([b"[]"] * shape[0])

    assert text_to_bytes("FP32", shape, nested, None, "x", 16, 0) == b""
    assert text_to_bytes("FP32", shape, b"[ ]", None, "x", 16, 0) == b""


@pytest.mark.parametrize(
    ("datatype", "wrong", "told"),
    [
        ("FP32", '"a"', 'a number for FP32, got "a"'),
        ("INT8", "128", "an integer between -128 and 127 for INT8, got 128"),
        ("BOOL", "1", "true or false for BOOL, got 1"),
        ("BYTES", "null", "a string for BYTES, got null"),
    ],
)
def test_wrong_element_of_later_part_is_told_with_its_path(
    datatype: str, wrong: str, told: str
) -> None:
    """As if all had been decoded together."""
    right = {"BOOL": "true", "BYTES": '"a,["'}.get(datatype, "1")
    elements = [right] * MANY
    elements[777] = wrong
    flat = f"[{','.join(elements)}]".encode()
    rows = (f"[{','.join(elements[at : at + 10])}]" for at in range(0, MANY, 10))
    nested = f"[{', '.join(rows)}]".encode()

    assert refusal(datatype, [MANY], flat, 0) == f"x.data[777]: expected {told}"
    assert refusal(datatype, [100, 10], nested, 0) == f"x.data[77][7]: expected {told}"


def test_element_of_other_type_is_told_before_one_out_of_range() -> None:
    """It is so for a text that is decoded as a whole."""
    text = b"[%b]" % b",".join([b"300"] * MANY + [b"1.5"])

    assert refusal("INT8", [MANY + 1], text, 0) == (
        "x.data[1000]: expected an integer for INT8, got 1.5"
    )


def test_long_strings_of_escapes_are_converted_in_parts() -> None:
    """Wherever a part ends, no escape and no string is cut in two."""
    texts = ["\\" * 100, '"' * 77, ",][" * 50, "", 'a\\",'] * 3
    nested = [[each] for each in texts]
    for element, shape in ((texts, [15]), (nested, [15, 1])):
        encoded = msgspec.json.encode(element)
        for part_bytes in range(1, 40):
            made = text_to_bytes("BYTES", shape, encoded, None, "x", part_bytes, 0)
            assert made == data_to_bytes("BYTES", shape, element, None, "x")


@pytest.mark.parametrize("located_values", [0, MANY])
@pytest.mark.parametrize(
    ("shape", "text", "told"),
    [
        ([4], b"[1,2,3,1e999]", "x.data[3]: expected a value in range, got number out of range"),
        ([2, 2], b"[[1,2],[-1e999,4]]", "x.data[1][0]: expected a value in range"),
        ([2], b'["a", "\xff"]', "value: expected UTF-8 in every string, got byte 0xff"),
        ([2], b'["%b", 1e999]' % (b"a" * 50), "x.data[1]: expected a value in range"),
    ],
)
def test_text_without_value_in_python_is_refused_with_its_path(
    shape: list[int], text: bytes, told: str, located_values: int
) -> None:
    """The parser finds it in a part of the text."""
    assert refusal("BYTES" if b'"' in text else "FP32", shape, text, located_values).startswith(
        told
    )


def test_value_out_of_range_in_other_nesting_is_told_with_its_path() -> None:
    """The text is decoded as a whole to say where."""
    text = b'[[0],{"a":[1e999]}]'

    assert refusal("FP32", [2], text, MANY).startswith("x.data[1][...][0]: expected a value in")
    assert refusal("FP32", [2], b"1e999", MANY).startswith("x.data: expected a value in range")
