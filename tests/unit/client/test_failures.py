"""Calls that do not end with an answer, or not in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from headrace.client import Client, ClientClosed, InferenceError, InferenceTimeout, Response
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.log.errors import LogAuthenticationFailed, LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicPartition
from tests.support.conditions import eventually
from tests.support.logs import write_to
from tests.support.responder import Responder, answer, echo, refusal

INPUTS = {"x": np.zeros((1, 2), np.float32)}
REPLIES = TopicPartition("headrace.responses", 1)


@pytest.fixture
def silent(responder: Responder) -> Responder:
    """A responder that answers nothing by itself."""
    responder.script = lambda record: []
    return responder


async def test_error_answer_raises_its_exception(client: Client, responder: Responder) -> None:
    """Code, message and hints of an error answer are the exception's."""
    responder.script = lambda record: [
        refusal("OVERLOADED", "queue: expected room", retriable=True, retry_after_ms=40)
    ]
    with pytest.raises(InferenceError) as caught:
        await client.infer("m", INPUTS)
    error = caught.value
    assert (error.code, error.message) == ("OVERLOADED", "queue: expected room")
    assert (error.retriable, error.retry_after_ms) == (True, 40)
    assert str(error) == "OVERLOADED: queue: expected room"


async def test_unknown_error_code_is_kept(client: Client, responder: Responder) -> None:
    """A service that is newer than the client may have more codes."""
    responder.script = lambda record: [refusal("MELTED", "too hot")]
    with pytest.raises(InferenceError) as caught:
        await client.infer("m", INPUTS)
    assert caught.value.code == "MELTED"


async def test_unreadable_answer_raises(client: Client, responder: Responder) -> None:
    """An unreadable answer fails its own call and no other."""
    responder.script = lambda record: [b"\xc1"]
    with pytest.raises(InferenceError, match="INTERNAL"):
        await client.infer("m", INPUTS)
    responder.script = echo
    await client.infer("m", INPUTS)


async def test_arrays_without_datatype_are_refused(client: Client) -> None:
    """An array whose type the protocol cannot name is refused with its code before it is sent."""
    with pytest.raises(InferenceError) as caught:
        await client.infer("m", {"x": np.zeros(1, np.complex64)})
    assert (caught.value.code, caught.value.retriable) == ("INVALID_TENSOR", False)


async def test_lists_of_different_lengths_are_refused_with_name_of_input(client: Client) -> None:
    """NumPy's error alone does not say which of the inputs it is."""
    with pytest.raises(InferenceError, match="ids: expected lists of one length") as caught:
        await client.infer("m", {**INPUTS, "ids": [[1, 2], [3]]})
    assert (caught.value.code, caught.value.retriable) == ("INVALID_TENSOR", False)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.infer("m", {"x": ["a\udcff"]}),
        lambda client: client.infer("m\udcff", INPUTS),
        lambda client: client.infer("m", INPUTS, tenant="t\udcff"),
        lambda client: client.infer_raw("m\udcff", b"", "text/plain"),
        lambda client: client.infer_raw("m", b"", "text/\udcff"),
    ],
    ids=["element", "model", "tenant", "model of payload", "content type"],
)
async def test_text_that_is_not_utf8_is_refused(
    client: Client, call: Callable[[Client], Coroutine[Any, Any, Response]]
) -> None:
    """Python has such a text for a name of a file that is not UTF-8."""
    with pytest.raises(InferenceError, match=r"expected text in UTF-8, got '.*\\udcff'") as caught:
        await call(client)
    assert (caught.value.code, caught.value.retriable) == ("INVALID_REQUEST", False)


async def test_name_of_output_without_list_is_refused(client: Client) -> None:
    """A text is a sequence of texts, which type checkers accept; its letters are no outputs."""
    with pytest.raises(TypeError, match="outputs: expected a list of names, got 'label'"):
        await client.infer("m", INPUTS, outputs="label")


async def test_requests_too_large_for_topic_are_refused(client: Client) -> None:
    """The log's refusal of a record has the same form."""
    with pytest.raises(InferenceError) as caught:
        await client.infer("m", {"x": np.zeros(9 * 1024 * 1024, np.uint8)})
    assert caught.value.code == "TOO_LARGE"


async def test_call_without_answer_times_out(client: Client, silent: Responder) -> None:
    """A call ends at its timeout, whatever the services do."""
    with pytest.raises(InferenceTimeout, match=r"no answer within 0\.05 s"):
        await client.infer("m", INPUTS, timeout_s=0.05)


class _Measured:
    """Two values that count how often they were made an array."""

    def __init__(self) -> None:
        self.made = 0

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray[Any, Any]:
        self.made += 1
        return np.zeros((1, 2), np.float32)


async def test_call_without_place_holds_no_encoded_request(
    log: MemoryLog, settings: Settings, silent: Responder
) -> None:
    """Any number of calls may wait for a place, and only those that have one are encoded."""
    value = _Measured()
    async with (
        Client(log=log, settings=settings, max_in_flight=2) as client,
        asyncio.TaskGroup() as tasks,
    ):
        calls = [tasks.create_task(client.infer("m", {"x": value})) for _ in range(20)]
        await eventually(lambda: len(silent.seen) == 2)
        made = value.made
        for each in calls:
            each.cancel()
    assert made == 2


async def test_calls_without_place_are_not_encoded_when_client_closes(
    log: MemoryLog, settings: Settings, silent: Responder
) -> None:
    """They fail at once, however many they are and however long encoding them would take."""
    value = _Measured()
    async with (
        asyncio.TaskGroup() as tasks,
        Client(log=log, settings=settings, max_in_flight=2) as client,
    ):
        calls = [tasks.create_task(_failure(client.infer("m", {"x": value}))) for _ in range(20)]
        await eventually(lambda: len(silent.seen) == 2)
    assert {type(each.result()) for each in calls} == {ClientClosed}
    assert value.made == 2


async def _failure(call: Coroutine[Any, Any, object]) -> Exception | None:
    try:
        await call
    except ClientClosed as error:
        return error
    return None


async def test_late_answers_are_dropped_and_counted(client: Client, silent: Responder) -> None:
    """An answer after the timeout disturbs nobody."""
    with pytest.raises(InferenceTimeout):
        await client.infer("m", INPUTS, timeout_s=0.05)
    await eventually(lambda: silent.seen)
    await silent.reply(silent.seen[0], answer())
    await eventually(lambda: client.late_answers == 1)
    silent.script = echo
    await client.infer("m", INPUTS)


async def test_repeated_answers_are_dropped_and_counted(
    client: Client, responder: Responder
) -> None:
    """At-least-once delivery may answer twice; the first one counts."""
    responder.script = lambda record: [answer(id="first"), answer(id="second")]
    assert (await client.infer("m", INPUTS)).id == "first"
    await eventually(lambda: client.late_answers == 1)


async def test_answers_without_correlation_id_are_ignored(
    client: Client, responder: Responder, log: MemoryLog
) -> None:
    """A record on the reply partition that answers nothing of ours is passed over."""
    await write_to(log, REPLIES, b"stray", NewRecord(None, None, [("kafka_correlationId", None)]))
    await client.infer("m", INPUTS)
    assert client.foreign_answers == 2


async def test_cancelled_call_leaves_others_running(client: Client, silent: Responder) -> None:
    """Cancelling one call does not disturb the one beside it."""
    async with asyncio.TaskGroup() as tasks:
        given_up = tasks.create_task(client.infer("m", INPUTS, id="given up"), name="given up")
        kept = tasks.create_task(client.infer("m", INPUTS, id="kept"), name="kept")
        await eventually(lambda: len(silent.seen) == 2)
        given_up.cancel()
        for record in silent.seen:
            await silent.reply(record, *echo(record))
        assert (await kept).id == "kept"
    assert given_up.cancelled()


async def test_cancelled_call_cancels_its_request(client: Client, silent: Responder) -> None:
    """The services are told, by the correlation id; a call that has timed out tells nobody."""
    with pytest.raises(InferenceTimeout):
        await client.infer("m", INPUTS, id="late", timeout_s=0.05)
    given_up = asyncio.create_task(client.infer("m", INPUTS, id="given up"))
    await eventually(lambda: len(silent.seen) == 2)
    given_up.cancel()

    await eventually(lambda: silent.cancelled)

    assert silent.cancelled == [dict(silent.seen[1].headers)["kafka_correlationId"]]


async def test_calls_in_flight_are_bounded(
    log: MemoryLog, settings: Settings, silent: Responder
) -> None:
    """Beyond `max_in_flight` a call waits its turn, and its timeout counts meanwhile."""
    async with (
        Client(log=log, settings=settings, max_in_flight=1) as client,
        asyncio.TaskGroup() as tasks,
    ):
        first = tasks.create_task(client.infer("m", INPUTS, id="first"), name="first")
        await eventually(lambda: silent.seen)
        with pytest.raises(InferenceTimeout):
            await client.infer("m", INPUTS, timeout_s=0.05)
        assert len(silent.seen) == 1
        await silent.reply(silent.seen[0], *echo(silent.seen[0]))
        assert (await first).id == "first"


async def test_closing_client_fails_waiting_calls(
    log: MemoryLog, settings: Settings, silent: Responder
) -> None:
    """Calls that wait when the client is closed fail at once."""

    async def wait_in_vain() -> None:
        with pytest.raises(ClientClosed, match="closed before the answer came"):
            await client.infer("m", INPUTS)

    async with asyncio.TaskGroup() as tasks, Client(log=log, settings=settings) as client:
        tasks.create_task(wait_in_vain(), name="call")
        await eventually(lambda: silent.seen)


async def test_reading_refused_by_broker_fails_all_calls(
    log: MemoryLog, settings: Settings, silent: Responder
) -> None:
    """Once the broker lets us read no more, calls under way and later ones say why."""
    async with Client(log=log, settings=settings, reply_partition=1) as client:

        async def wait_in_vain() -> None:
            with pytest.raises(ClientClosed, match="no longer be read: not allowed to read"):
                await client.infer("m", INPUTS)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait_in_vain(), name="call")
            await eventually(lambda: silent.seen)
            log.faults.topics.forbid_reading(REPLIES.topic)
        await wait_in_vain()


async def test_forbidden_requests_topic_is_not_reported_missing(
    log: MemoryLog, settings: Settings
) -> None:
    """A client that may not write requests does not open, and says so."""
    log.faults.topics.forbid("headrace.requests", hidden=True)
    with pytest.raises(LogAuthenticationFailed, match=r"not allowed .* headrace\.requests"):
        async with Client(log=log, settings=settings):
            pass


async def test_closing_client_keeps_shared_log_open(log: MemoryLog, settings: Settings) -> None:
    """A log that was handed in is its owner's to close, and can serve another client."""
    async with Client(log=log, settings=settings):
        pass
    async with Client(log=log, settings=settings):
        pass


async def test_error_inside_client_context_is_not_wrapped(
    log: MemoryLog, settings: Settings
) -> None:
    """An exception of the user's own block leaves it unchanged."""
    with pytest.raises(KeyError):
        async with Client(log=log, settings=settings):
            raise KeyError("the user's own")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_calling_unopened_client_raises(
    log: MemoryLog, settings: Settings, when: str
) -> None:
    """Outside `async with` nothing is sent."""
    client = Client(log=log, settings=settings)
    if when == "after":
        async with client:
            pass
    with pytest.raises(ClientClosed, match="not open"):
        await client.infer("m", INPUTS)


async def test_unacknowledged_request_fails_with_error_of_log(
    client: Client, log: MemoryLog
) -> None:
    """When the broker is unavailable the call fails with the log's error, not by its timeout."""
    log.faults.brokers.take_down()
    with pytest.raises(LogUnavailable):
        await client.infer("m", INPUTS)


async def test_answers_survive_outage(client: Client, silent: Responder, log: MemoryLog) -> None:
    """A broker that goes and comes back between request and answer is not noticed."""
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(client.infer("m", INPUTS, id="patient"), name="call")
        await eventually(lambda: silent.seen)
        log.faults.brokers.take_down()
        log.faults.brokers.bring_back()
        await silent.reply(silent.seen[0], *echo(silent.seen[0]))
        assert (await call).id == "patient"


async def test_client_resumes_reading_after_retention(
    client: Client, responder: Responder, log: MemoryLog
) -> None:
    """Answers that retention took are lost; those that come later are read."""
    log.faults.partitions.skip_offsets(REPLIES, 5)
    log.faults.partitions.trim(REPLIES, 5)
    assert (await client.infer("m", INPUTS, id="later")).id == "later"


async def test_client_resumes_reading_after_retention_although_request_fails(
    client: Client, responder: Responder, log: MemoryLog
) -> None:
    """It asks again where the partition begins and ends."""
    log.faults.brokers.fail_requests(1)
    log.faults.partitions.skip_offsets(REPLIES, 5)
    log.faults.partitions.trim(REPLIES, 5)
    await eventually(lambda: not log.faults.brokers.requests_to_fail)
    await client.infer("m", INPUTS)


async def test_client_ignores_answers_before_start(
    log: MemoryLog, settings: Settings, responder: Responder
) -> None:
    """A client reads from the end as it was before its first request."""
    await write_to(log, REPLIES, b"old", b"older")
    async with Client(log=log, settings=settings, reply_partition=1) as client:
        await client.infer("m", INPUTS)
    assert client.foreign_answers == 0


async def test_opening_client_without_topics_names_them(settings: Settings) -> None:
    """Without the topics there is nothing to open, and the fix is said."""
    with pytest.raises(ConfigurationError, match=r"headrace\.requests: does not exist; run"):
        async with Client(log=MemoryLog(), settings=settings):
            pass


async def test_missing_reply_partition_is_refused(log: MemoryLog, settings: Settings) -> None:
    """A reply partition that the topic does not have is refused on opening."""
    with pytest.raises(ConfigurationError, match=r"expected 0 to 2 of .*, got 3"):
        async with Client(log=log, settings=settings, reply_partition=3):
            pass


async def test_client_without_log_is_refused(settings: Settings) -> None:
    """Without a broker and without a log there is nobody to ask."""
    with pytest.raises(ConfigurationError, match="the client needs a broker"):
        async with Client(settings=settings):
            pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"content_type": "text/xml"}, "content_type: expected application/msgpack"),
        ({"max_in_flight": 0}, "max_in_flight: expected at least 1, got 0"),
    ],
)
def test_wrong_infer_arguments_are_refused(wrong: dict[str, object], said: str) -> None:
    """The constructor says what was expected."""
    with pytest.raises(ValueError, match=said):
        Client("127.0.0.1:9092", **wrong)  # type: ignore[arg-type]  # wrong on purpose
