"""The contract's files: current, valid, and true of the bytes that are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from jsonschema import Draft202012Validator

from headrace.protocol.schemas.__main__ import faults, write
from headrace.protocol.schemas.golden import SAMPLES
from headrace.protocol.schemas.types import SCHEMAS
from headrace.topics import TOPICS

DIRECTORY = Path(__file__).parents[2] / "schemas"


@cache
def asyncapi() -> dict[str, Any]:
    """Return the AsyncAPI document; parsing takes a while, so only tests of it do."""
    return dict(yaml.safe_load((DIRECTORY / "asyncapi.yaml").read_text(encoding="utf-8")))


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    """All objects of a document."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from nodes(value)


def resolve(reference: str) -> Any:
    """Return the target of a reference in the AsyncAPI document."""
    if reference.startswith("./"):
        return json.loads((DIRECTORY / reference).read_text(encoding="utf-8"))
    found: Any = asyncapi()
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def test_schema_files_match_code() -> None:
    """A change of a type shows in the schemas; golden samples are written and read as ever."""
    assert list(faults(DIRECTORY)) == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_valid_json_schema(name: str) -> None:
    """Each schema is valid in the dialect that it names."""
    schema = json.loads((DIRECTORY / f"{name}.schema.json").read_text(encoding="utf-8"))

    Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_sample_fits_its_schema(name: str) -> None:
    """Types in code and schemas in files say the same."""
    sample = SAMPLES[name]
    schema = json.loads((DIRECTORY / f"{sample.schema}.schema.json").read_text(encoding="utf-8"))
    described = json.loads((DIRECTORY / "golden" / f"{name}.json").read_text(encoding="utf-8"))

    Draft202012Validator(schema).validate(described["value"])


def test_asyncapi_references_resolve() -> None:
    """References lead within the document or to the schemas beside it."""
    references = [node["$ref"] for node in nodes(asyncapi()) if "$ref" in node]

    assert references
    assert all(resolve(reference) for reference in references)


def test_asyncapi_has_required_parts() -> None:
    """Version, title, and for operations an action and a channel of the document."""
    assert re.fullmatch(r"3\.0\.\d+", asyncapi()["asyncapi"])
    assert {"title", "version"} <= asyncapi()["info"].keys()
    assert asyncapi().keys() <= {
        "asyncapi", "id", "info", "servers", "defaultContentType", "channels", "operations",
        "components",
    }  # fmt: skip
    for operation in asyncapi()["operations"].values():
        assert operation["action"] in ("send", "receive")
        assert operation["channel"]["$ref"].startswith("#/channels/")


def test_asyncapi_component_names_are_valid_keys() -> None:
    """Components' names are of letters, digits, points, dashes and underscores."""
    for group in asyncapi()["components"].values():
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in group)


def test_asyncapi_has_channel_for_every_topic() -> None:
    """The map of topics in the code is the map in the document."""
    addresses = {channel["address"] for channel in asyncapi()["channels"].values()}

    assert addresses == {f"{{namespace}}.{topic}" for topic in TOPICS}
    for channel in asyncapi()["channels"].values():
        assert set(re.findall(r"{(\w+)}", channel["address"])) == channel["parameters"].keys()
        assert channel["messages"]


def test_asyncapi_has_operation_for_every_reader_and_writer() -> None:
    """Stages receive what they read and send what they write."""
    operations = asyncapi()["operations"]

    assert len(operations) == sum(len(spec.readers) + len(spec.writers) for spec in TOPICS.values())


@pytest.mark.parametrize("damage", ["edited", "unreadable", "missing", "unknown", "misdescribed"])
def test_changed_golden_sample_is_found(tmp_path: Path, damage: str) -> None:
    """Any change is found."""
    write(tmp_path)
    path = tmp_path / "golden" / "request-msgpack-fp32.bin"
    content = path.read_bytes()
    if damage == "edited":
        path.write_bytes(content.replace(b"fp32", b"fp23"))
    elif damage == "unreadable":
        path.write_bytes(content[:-1])
    elif damage == "missing":
        path.unlink()
    elif damage == "unknown":
        path.with_name("unknown.bin").write_bytes(content)
    else:
        path.with_suffix(".json").write_text("{}", encoding="utf-8")

    assert list(faults(tmp_path))


def test_writing_schemas_edits_no_golden_sample(tmp_path: Path) -> None:
    """A sample that differs stays, for a person to judge."""
    write(tmp_path)
    path = tmp_path / "golden" / "item.bin"
    path.write_bytes(b"older")

    write(tmp_path)

    assert path.read_bytes() == b"older"


def test_stale_schema_is_found_and_rewritten(tmp_path: Path) -> None:
    """Schemas follow the code."""
    write(tmp_path)
    path = tmp_path / "item-record.schema.json"
    path.write_text("{}", encoding="utf-8")

    assert [fault.split(":")[0] for fault in faults(tmp_path)] == [str(path)]
    write(tmp_path)
    assert not list(faults(tmp_path))


def test_golden_samples_in_messagepack_are_maps() -> None:
    """Maps, unlike arrays, allow fields to be added."""
    for name, sample in SAMPLES.items():
        if sample.content_type == "application/msgpack":
            content = (DIRECTORY / "golden" / f"{name}.bin").read_bytes()
            value = msgspec.msgpack.decode(sample.plain(content))
            assert isinstance(value, dict)
