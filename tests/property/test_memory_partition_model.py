"""A partition of the embedded log against the plainest model: a dict of what is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.log.memory.broker import Partition, payload_bytes
from headrace.log.port import NewRecord, TopicPartition

_STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "skip", "trim"]), st.integers(1, 30)), max_size=40
)


@given(steps=_STEPS, retention_bytes=st.integers(1, 20_000), read_from=st.floats(0, 1))
def test_read_returns_exactly_held_records(
    steps: list[tuple[str, int]], retention_bytes: int, read_from: float
) -> None:
    """Records appended, skipped, trimmed and retained in any order: none is lost, none made up."""
    partition = Partition(TopicPartition("t", 0), retention_bytes)
    held: dict[int, bytes] = {}
    for what, count in steps:
        if what == "append":
            values = [str(partition.end + index).encode() for index in range(count)]
            held |= {partition.end + index: value for index, value in enumerate(values)}
            records = [NewRecord(None, value) for value in values]
            partition.append(records, [payload_bytes(record) for record in records], 0)
        elif what == "skip":
            partition.skip(count)
        else:
            partition.trim(min(partition.begin + count, partition.end))
    start = partition.begin + int((partition.end - partition.begin) * read_from)
    found = {record.offset: record.value for record in partition.read(start, 10_000)[0]}
    assert found == {offset: value for offset, value in held.items() if offset >= start}
