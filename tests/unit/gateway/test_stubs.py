"""The generated modules of the protocol: those of the .proto, and those of Triton's client."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from headrace.gateway import open_inference_pb2
from tests.support.tree import ROOT

IN_PART = {"ModelConfig", "ModelInput", "ModelOutput"}
"""Messages of which only some fields are filled; the other numbers are not used otherwise."""
OURS = open_inference_pb2.DESCRIPTOR
TRITONS: dict[str, Any] = {
    **model_config_pb2.DESCRIPTOR.message_types_by_name,
    **service_pb2.DESCRIPTOR.message_types_by_name,
}


def described(field: FieldDescriptor) -> tuple[Any, ...]:
    """Return the name of a field, and the properties on which its bytes depend."""
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof
    return (
        field.name,
        field.type,
        field.is_repeated,
        kind.full_name if kind else None,
        oneof.name if oneof else None,
    )


def fields_of(message: Descriptor) -> dict[int, tuple[Any, ...]]:
    """The fields of a message by their numbers."""
    return {number: described(field) for number, field in message.fields_by_number.items()}


def test_modules_are_those_of_proto() -> None:
    """`make stubs` would change nothing."""
    command = [sys.executable, "tools/stubs.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (checked.returncode, checked.stderr) == (0, "")


def test_service_has_methods_of_triton() -> None:
    """All 20, with their messages and directions."""

    def methods(service: Any) -> set[tuple[Any, ...]]:
        return {
            (
                each.name,
                each.input_type.full_name,
                each.output_type.full_name,
                each.client_streaming,
                each.server_streaming,
            )
            for each in service.methods
        }

    ours = methods(OURS.services_by_name["GRPCInferenceService"])

    assert ours == methods(service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"])
    assert len(ours) == 20


def test_all_messages_of_service_are_described() -> None:
    """Those of Triton's service, and of its configuration those that are filled."""
    names = set(OURS.message_types_by_name)

    assert names == set(service_pb2.DESCRIPTOR.message_types_by_name) | IN_PART


@pytest.mark.parametrize("name", OURS.message_types_by_name)
def test_message_has_fields_of_triton(name: str) -> None:
    """Names, numbers and types, in nested messages as well."""

    def compare(ours: Descriptor, tritons: Descriptor) -> None:
        theirs = fields_of(tritons)
        if name in IN_PART:
            theirs = {number: theirs[number] for number in ours.fields_by_number}
        assert fields_of(ours) == theirs
        for nested in ours.nested_types:
            compare(nested, tritons.nested_types_by_name[nested.name])

    compare(OURS.message_types_by_name[name], TRITONS[name])


def test_datatypes_have_numbers_of_triton() -> None:
    """In the configuration, where they are an enumeration."""
    theirs = model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values

    assert [(each.name, each.number) for each in OURS.enum_types_by_name["DataType"].values] == [
        (each.name, each.number) for each in theirs
    ]


def test_descriptors_have_pool_of_their_own() -> None:
    """Triton's client, whose names are the same, is imported in this very process."""
    assert OURS.pool is not service_pb2.DESCRIPTOR.pool
