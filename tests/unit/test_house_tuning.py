"""Chosen numbers of the serving path stand in `headrace.tuning`, and facts beside the code.

A chosen number that is a constant of its module cannot be passed to the object that a test makes,
and cannot be found by somebody who looks for what may be tuned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.tree import Module, modules

SERVING = (
    *(
        "access",
        "claims",
        "consumer",
        "control",
        "crash_isolation",
        "delivery",
        "device",
        "gateway",
        "log",
        "models",
        "primitives",
    ),
    *("protocol", "runtime", "telemetry", "transport"),
)
"""The packages of `headrace` that a serving process consists of, besides the services."""
FACTS = {
    # What a record is charged for, which the promise about memory is counted in.
    "headrace/delivery/inflight.py": {"RECORD_OVERHEAD_BYTES", "HEADER_OVERHEAD_BYTES"},
    "headrace/log/kafka/fetch_buffer.py": {"_MAGIC_AT"},
    "headrace/log/port.py": {"MAX_POLL_BYTES"},
    "headrace/models/inputs/avro.py": {"_SYNC_BYTES"},
    "headrace/models/inputs/protobuf.py": {"_CONTINUES"},
    "headrace/models/inputs/framing.py": {"_MAGIC"},
    "headrace/models/inputs/image_files.py": {
        *("_ORIENTATION", "_CORE_HEADER_BYTES", "_UNCOMPRESSED"),
    },
    "headrace/models/inputs/images.py": {"_LEVELS"},
    "headrace/models/inputs/mel.py": {"_SLANEY_HZ_PER_MEL"},
    "headrace/models/inputs/sound_files.py": {
        *("MAX_CHANNELS", "_EXTENSIBLE", "_OPEN_END", "_OPUS_RATE"),
    },
    "headrace/models/inputs/sounds.py": {"_VARIANCE_FLOOR"},
    # Formats: of records on Kafka, of commit metadata and crash markers, of DLPack and ONNX.
    "headrace/crash_isolation/markers.py": {"VERSION", "MOST_ATTEMPTS", "MOST_CHARACTERS"},
    "headrace/log/kafka/consumer.py": {"_LATEST_MS"},
    "headrace/log/kafka/direct_fetch.py": {
        "_READ_UNCOMMITTED",
        "_NO_REPLICA",
        "_EARLIEST",
        "_LATEST",
    },
    "headrace/protocol/control.py": {"FORMAT", "FORMAT_WITHOUT_OVERRIDES"},
    "headrace/protocol/events.py": {"NOT_CONTROLLED"},
    "headrace/protocol/codec/wire.py": {"FORMAT", "_COLUMNS_FORMAT"},
    "headrace/transport/shared_values.py": {"_MOST_BUFFERS"},
    "headrace/log/kafka/record_batches.py": {"MAX_HEADERS", "_FORMATS", "_LEGACY_MIN_BYTES"},
    "headrace/log/memory/group.py": {"MAX_METADATA_CHARACTERS"},
    "headrace/log/memory/broker.py": {"FRAMING_BYTES", "_OBJECT_BYTES"},
    "headrace/log/partitioner.py": {"_SEED", "_M", "_R", "_MASK"},
    "headrace/models/config.py": {"_LARGEST_FP32", "MAX_THREADS"},
    "headrace/models/packing/manifest.py": {
        *("MAX_MANIFEST_BYTES", "MAX_FILES", "MAX_FILE_BYTES", "MAX_MODEL_FILE_BYTES"),
        *("_MAX_NAME_BYTES", "_MAX_PART_BYTES", "_MAX_PARTS"),
    },
    "headrace/models/processing.py": {"OLDEST_OPSET"},
    "headrace/protocol/trace_context.py": {"SAMPLED", "RANDOM", "_VERSION_00_BYTES"},
    "services/executor/buffers.py": {"_ALIGNMENT_BYTES"},
    # Codes and special values of Kafka's protocol, of ONNX Runtime, and of our own.
    "headrace/log/kafka/admin.py": {"_TOPIC", "_NO_OFFSET"},
    "headrace/log/kafka/cluster.py": {
        *("_BROKER", "_UNKNOWN_RIGHTS", "_FETCH", "_DESCRIBE_TRANSACTIONS"),
    },
    "headrace/log/kafka/topic_cache.py": {"_NO_LEADER", "_FORBIDDEN"},
    "headrace/log/kafka/transaction_requests.py": {"_FINALIZED_FEATURES_TAG", "_NO_LEADER_EPOCH"},
    "headrace/log/kafka/producer.py": {
        "SEQUENCES",
        "_ALL_REPLICAS",
        "_NO_LEADER",
        "_NO_TIMEOUT_MS",
    },
    "headrace/log/kafka/record_requests.py": {"_NO_REPLICA"},
    "headrace/log/kafka/transactions.py": {"_ALL_REPLICAS"},
    "headrace/models/backends/onnx_session.py": {"_FATAL"},
    "headrace/models/inputs/binding.py": {"_BY_CONTENT"},
    "headrace/models/inputs/padding.py": {"_UNKNOWN"},
    "headrace/telemetry/watchdog.py": {"_STDERR"},
    # The contract with callers: limits of a request, and what an error text may quote of it.
    "headrace/protocol/codec/faults.py": {"_MAX_SHOWN"},
    "headrace/gateway/gateway.py": {"MAX_TIMEOUT_MS"},
    "headrace/gateway/http.py": {"CALLER_GONE"},
    "headrace/gateway/grpc_parts.py": {"_MAX_VARINT_BYTES"},  # of Protobuf's encoding
    "headrace/access/tokens.py": {"_LEAST_RSA_BITS"},  # RFC 7518, section 3.3
    "headrace/protocol/codec/responses.py": {"_FIXED_MAP"},
    "headrace/protocol/headers.py": {
        *("MAX_PRIORITY", "MAX_HEADER_BYTES", "MAX_SHOWN_NAME", "_LOOKED_AT_BYTES"),
        *("_MAX_COUNT", "_MAX_DIGITS", "OWN_ANSWER_HEADERS"),
    },
    "headrace/protocol/claims.py": {"MAX_CLAIM_BYTES"},
    "headrace/protocol/compression.py": {"_MAX_INFLATION"},  # of RFC 1951
    "headrace/protocol/messages.py": {
        *("MAX_RANK", "MAX_INPUTS", "MAX_OUTPUTS", "MAX_NAME_LENGTH", "MAX_PARAMETERS"),
    },
    "headrace/protocol/schemas/golden.py": {"_TIMESTAMP_MS"},
    "headrace/protocol/tensors.py": {"MAX_TENSOR_BYTES"},
    "headrace/telemetry/metric_specs.py": {"ROWS"},
    # The search for a request that ends its process: how many crashes it takes is documented.
    "headrace/crash_isolation/poison_search.py": {"CAREFUL_FROM"},
    # Units, and the bound of an exponent.
    "headrace/device/port.py": {"_MIB"},
    "headrace/gateway/statistics.py": {"_US_NS"},
    "headrace/primitives/backoff.py": {"_MOST_DOUBLINGS"},
    # Of prctl(2).
    "headrace/primitives/child_process.py": {"_PR_SET_PDEATHSIG"},
}
"""Numbers that are not chosen, by module."""

CHOSEN = {
    "headrace/log/kafka/record_batches.py": {
        *("DEFAULT_DECOMPRESSED_BYTES", "_FIRST_GUESS_BYTES", "_GROWTH", "_MAX_GZIP_MEMBERS"),
    },
    "services/executor/device/instance.py": {"GRAPH_RUNS"},
}
"""Chosen numbers that are still constants of their modules. None is to be added."""


def serving_modules() -> list[Module]:
    """The modules of the serving path."""
    folders = [f"headrace/{package}" for package in SERVING]
    return [*modules(*folders), *modules("services")]


def is_number(value: ast.expr) -> bool:
    """Whether an expression is a number, or a tuple of numbers, written out."""
    match value:
        case ast.Constant(value=number):
            return isinstance(number, int | float) and not isinstance(number, bool)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.Tuple(elts=elements):
            return bool(elements) and all(map(is_number, elements))
    return False


def constants_in(tree: ast.Module) -> Iterator[str]:
    """The names of a module's own constants that are numbers."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_number(value):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if is_number(
                value
            ):
                yield name


def numbers_found() -> set[tuple[str, str]]:
    """The constants of the serving path that are numbers, with the paths of their modules."""
    return {
        (str(module.path), name)
        for module in serving_modules()
        for name in constants_in(module.tree)
    }


def numbers_listed() -> set[tuple[str, str]]:
    """The entries of the two tables above."""
    return {
        (path, name) for each in (FACTS, CHOSEN) for path, names in each.items() for name in names
    }


def test_serving_path_has_no_tuning_constant() -> None:
    """A chosen number is a field in `headrace.tuning`; a fact is listed above."""
    assert numbers_found() - numbers_listed() == set(), (
        "each belongs into headrace/tuning.py, or is a fact"
    )


def test_listed_number_is_in_its_module() -> None:
    """An entry that outlives its constant would excuse the next one of that name."""
    assert numbers_listed() - numbers_found() == set(), "each is gone or moved: drop its entry"


@pytest.mark.parametrize(
    "line", ["A_S = 2.0", "A = -1", "A = 16 * 1024", "A: Final = 3", "A = (1, 2)", "A: int = 2**31"]
)
def test_tuning_constant_is_recognised(line: str) -> None:
    """Signs, products, annotations and tuples do not hide a number."""
    assert list(constants_in(ast.parse(line))) == ["A_S" if line.startswith("A_S") else "A"]


@pytest.mark.parametrize(
    "line",
    ['A = "2"', "A = True", "A = TUNING.consumer.poll_timeout_s", "A = ()", "def a(): b = 2"],
)
def test_other_constants_are_accepted(line: str) -> None:
    """Text, switches, names and what a function keeps for itself are no constants of a module."""
    assert list(constants_in(ast.parse(line))) == []
