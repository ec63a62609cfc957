"""Tests use the public face of the code: no private attributes, no patched constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.tree import TESTS, Module, modules

PRIVATE = {
    "tests/broker/test_forbidden_topics.py": "the aiokafka sender must stay the same",
    "tests/broker/test_kafka_adapter.py": "ends aiokafka's tasks, as a bug in it did",
    "tests/broker/test_kafka_security.py": "every part of the log is printed, private ones as well",
    "tests/broker/test_kafka_transactions.py": "sends of a zombie that its public face refuses",
    "tests/flow/test_demo_magika.py": "magika's package shows its features only there",
    "tests/property/test_ordering.py": "prunes at every step, which it does after thousands",
    "tests/support/acl.py": "aiokafka's admin client cannot set access rules",
    "tests/support/quotas.py": "aiokafka's admin client cannot set quotas",
    "tests/unit/flow/test_source.py": "faults in the middle of a commit and of an assignment",
    "tests/unit/models/test_binding.py": "the size of a cache that has no other sign",
    "tests/unit/models/test_latency.py": "the size of a table that has no other sign",
    "tests/unit/models/test_onnx_runtime.py": "the options that ONNX Runtime was given",
    "tests/unit/services/test_device_instance.py": "an absent device, and the end of threads",
    "tests/unit/services/test_host_blocks.py": "the addresses of reused memory",
    "tests/unit/services/test_ring.py": "the schedule of a ring is planted with a bug",
    "tests/unit/services/test_transform_thread.py": "whether a thread was started",
    "tests/unit/test_kafka_epoch.py": "the rules for errors, without a broker",
    "tests/unit/test_kafka_fetched.py": "aiokafka's fetcher, which the adapter reads",
    "tests/unit/test_kafka_reading.py": "aiokafka's connection, which the adapter reads",
    "tests/unit/test_kafka_reconnect.py": "aiokafka's list of brokers",
    "tests/unit/test_memory_partition.py": "the length of a list that has no other sign",
    "tests/unit/transport/test_heartbeat.py": "an event is set before its task has run",
}
"""Files that use private attributes of other objects, and the reason."""

NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}


def test_tests_use_no_private_attributes() -> None:
    """A test that reads a private attribute fails when a class is rewritten that still works."""
    found = [
        f"{module.path}:{node.lineno}: {node.attr}"
        for module in modules(*TESTS)
        if str(module.path) not in PRIVATE
        for node in private_uses(module)
    ]

    assert not found, "\n".join(found)


def test_tests_patch_no_constants() -> None:
    """A value that a test changes is passed in, by a constructor or a tuning value."""
    patched = [
        f"{module.at(node)}: {name}" for module in modules(*TESTS) for node, name in patches(module)
    ]

    assert not [each for each in patched if each.rsplit(": ")[-1].isupper()]


def private_uses(module: Module) -> Iterator[ast.Attribute]:
    """Yield uses of private attributes of other objects than the method's own."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in {"self", "cls"}):
                yield node


def is_private(name: str) -> bool:
    """Return True for a name with one leading underscore that no NamedTuple has."""
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def patches(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements that call `monkeypatch.setattr`, with the name of the attribute."""
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == "setattr"
        ):
            names = [each.value for each in node.value.args if isinstance(each, ast.Constant)]
            yield node, str(names[0]).rsplit(".", 1)[-1] if names else ""
