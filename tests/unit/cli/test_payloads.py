"""`headrace infer --explain`, and sample payloads in `headrace models check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.outcome import Exit
from headrace.cli.payloads import guess_content_type
from tests.support.command_line import Call
from tests.support.models import add_version, digits

CONFIG = """
[transform.record]
columns = ["first"]

[transform.record.inputs]
pixels = [{columns}]
"""
COLUMNS = ", ".join(f'{{ path = "p{number}", default = {number} }}' for number in range(1, 64))
RECORDS = CONFIG.format(columns=f'{{ path = "first" }}, {COLUMNS}')


@pytest.fixture
def version(tmp_path: Path, call: Call) -> Path:
    """Version 1 of `digits`, which takes records, in the repository of the default settings."""
    add_version(tmp_path / "models", "digits", 1, digits(), RECORDS)
    return tmp_path / "models" / "digits" / "1"


def payload(directory: Path, name: str, content: str) -> str:
    """A file with a payload."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(content)
    return str(directory / name)


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("a.json", "application/json"),
        ("a.CSV", "text/csv"),
        ("a.ndjson", "application/x-ndjson"),
        ("a.avro", "avro/binary"),
        ("a.png", "image/png"),
        ("a", "application/octet-stream"),
    ],
)
def test_content_type_follows_from_name(name: str, content_type: str) -> None:
    """Content types of records, which Python does not know, follow from names as well."""
    assert guess_content_type(name) == content_type


def test_content_type_of_avro_follows_from_its_first_bytes() -> None:
    """Programs write containers with this suffix, which are another content type."""
    assert guess_content_type("a.avro", b"Obj\x01\x04") == "avro/container"


def test_explain_shows_inputs_of_payload(version: Path, tmp_path: Path, call: Call) -> None:
    """Name, datatype, shape and values, as answers are shown."""
    file = payload(tmp_path, "orders.json", '[{"first": 7.5}, {"first": -1}]')
    result = call("infer", "digits", "--file", file, "--explain")

    assert result.exit_code == Exit.DONE
    assert result.stdout.startswith("pixels FP32 [2, 64] [[ 7.5,  1. ,")


def test_explained_json_is_a_request(version: Path, tmp_path: Path, call: Call) -> None:
    """It has the fields of the protocol."""
    file = payload(tmp_path, "orders.json", '{"first": 7.5}')
    request = json.loads(call("infer", "digits", "--file", file, "--explain", "--json").stdout)

    assert (request["model_name"], request["model_version"]) == ("digits", "1")
    (given,) = request["inputs"]
    assert (given["name"], given["datatype"], given["shape"]) == ("pixels", "FP32", [1, 64])
    assert given["data"] == [7.5, *range(1, 64)]


def test_explain_says_what_is_wrong_with_payload(version: Path, tmp_path: Path, call: Call) -> None:
    """The message is the one that the caller of a service gets."""
    file = payload(tmp_path, "orders.json", '{"first": "much"}')
    result = call("infer", "digits", "--file", file, "--explain")

    assert result.exit_code == Exit.FAILED
    assert 'rows[0].first: expected a number, got "much"' in result.stderr


@pytest.mark.parametrize(
    "options", [("--input", "pixels=[[1]]"), ()], ids=["with input", "with nothing"]
)
def test_explain_without_file_is_wrong_usage(
    version: Path, call: Call, options: tuple[str, ...]
) -> None:
    """Only a payload needs explaining."""
    assert call("infer", "digits", *options, "--explain").exit_code == Exit.USAGE


def test_check_counts_samples_that_become_inputs(version: Path, call: Call) -> None:
    """Each file of the directory, by its name's content type; none that is hidden."""
    payload(version / "samples", "a.json", '{"first": 1}')
    payload(version / "samples", "b.csv", "1\n2\n")
    payload(version / "samples", ".DS_Store", "of a file manager")
    result = call("models", "check")

    assert result.exit_code == Exit.DONE
    assert "\n  samples: 2 passed" in result.stdout
    (entry,) = json.loads(call("models", "check", "--json").stdout)
    assert entry["samples"] == 2


def test_check_fails_version_that_refuses_sample(version: Path, call: Call) -> None:
    """The reason names file, row and path."""
    payload(version / "samples", "a.json", '{"first": 1}')
    payload(version / "samples", "b.json", '[{"first": 1}, {}]')
    result = call("models", "check")

    assert result.exit_code == Exit.FAILED
    assert (
        "samples/b.json: INVALID_TENSOR: rows[1].first: expected a number, got nothing"
        in result.stdout
    )


POSTPROCESS = """
def postprocess(outputs, request):
    if outputs["scores"].shape[0] == 3:
        raise ValueError("three rows")
    return {"label": outputs["scores"].argmax(axis=1)}
"""


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_check_makes_answers_of_samples_with_code_of_the_model(
    tmp_path: Path, call: Call, isolation: str
) -> None:
    """The model is run, and its postprocess; one that raises fails the version."""
    answer = (
        f'[answer.python]\nisolation = "{isolation}"\n'
        'outputs = [{ name = "label", datatype = "INT64", shape = [-1] }]\n'
    )
    directory = add_version(tmp_path / "models", "digits", 1, digits(), RECORDS + answer)
    (directory.parent / "postprocess.py").write_text(POSTPROCESS)
    payload(directory / "samples", "a.json", '{"first": 1}')
    passing = call("models", "check")
    payload(directory / "samples", "b.csv", "1\n2\n3\n")
    failing = call("models", "check")

    assert passing.exit_code == Exit.DONE, passing.stdout
    assert "\n  samples: 1 passed" in passing.stdout
    assert failing.exit_code == Exit.FAILED
    assert "samples/b.csv: MODEL_FAILED: postprocess: ValueError: three rows" in failing.stdout
    assert "\n  samples: 1 passed" in failing.stdout
