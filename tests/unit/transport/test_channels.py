"""Memory channels: one chunk at a time, ends that are noticed, pieces that are pulled."""

from __future__ import annotations

import asyncio

import pytest

from headrace.transport.channels import JOIN_S, MAX_JOINED, Ask, BatchQueue, Channel, join_lists


async def ack() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_channel_holds_one_chunk() -> None:
    """A writer waits while the reader is behind by one."""
    channel: Channel[int] = Channel()
    writer = channel.writer()
    await writer.send(1)
    second = asyncio.create_task(writer.send(2))
    await ack()

    assert not second.done()
    assert await channel.receive() == 1
    await second
    assert await channel.receive() == 2


async def test_chunks_of_many_writers_all_arrive() -> None:
    """However many wait for their turn, each chunk comes once."""
    channel: Channel[int] = Channel()
    writers = [channel.writer() for _ in range(10)]
    received = []
    async with asyncio.TaskGroup() as tasks:
        for number, writer in enumerate(writers):
            tasks.create_task(writer.send(number))
        for _ in writers:
            received += [await channel.receive()]

    assert sorted(received, key=str) == list(range(10))


async def test_the_reader_comes_to_the_end_when_all_writers_are_closed() -> None:
    """What was written before is read first; a reader that waits is woken."""
    channel: Channel[int] = Channel()
    first, second = channel.writer(), channel.writer()
    await first.send(1)
    first.close()
    first.close()  # once more does nothing
    assert await channel.receive() == 1
    reading = asyncio.create_task(channel.receive())
    await ack()
    assert not reading.done()

    second.close()

    assert await reading is None


async def test_a_writer_that_gives_up_loses_no_other_chunk() -> None:
    """A send that is cancelled while it waits leaves the channel as it was."""
    channel: Channel[int] = Channel()
    writer = channel.writer()
    await writer.send(1)
    given_up = asyncio.create_task(writer.send(2))
    kept = asyncio.create_task(writer.send(3))
    await ack()
    given_up.cancel()

    assert await channel.receive() == 1
    assert await channel.receive() == 3
    await kept
    with pytest.raises(asyncio.CancelledError):
        await given_up


async def test_small_chunks_join_while_they_wait() -> None:
    """A reader that is behind gets what was written meanwhile as one chunk, up to the bound."""
    channel: Channel[list[int]] = Channel(join_lists)
    writer = channel.writer()
    await writer.send([1])
    await writer.send([2, 3])
    too_many = asyncio.create_task(writer.send([4] * MAX_JOINED))
    await ack()

    assert not too_many.done()
    assert await channel.receive() == [1, 2, 3]
    await too_many
    assert await channel.receive() == [4] * MAX_JOINED


async def test_a_chunk_joins_no_more_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is always served at once has to let the reader run now and then."""
    now_s = 0.0
    monkeypatch.setattr("headrace.transport.channels.time.perf_counter", lambda: now_s)
    channel: Channel[list[int]] = Channel(join_lists)
    writer = channel.writer()
    await writer.send([1])
    now_s += JOIN_S
    later = asyncio.create_task(writer.send([2]))
    await ack()

    assert not later.done()
    assert await channel.receive() == [1]
    await later


class Shelf:
    """Pieces by key; those under `later` are held back from who will come again."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[str]] = {}
        self.later: dict[str, list[str]] = {}
        self.asked = 0

    def supply(self, key: str | None, ask: Ask) -> str | None:
        self.asked += 1
        stores = (self.pieces, self.later) if ask.at_once else (self.pieces,)
        for store in stores:
            for name in [key] if key is not None else list(store):
                if store.get(name):
                    return store[name].pop(0)
        return None


async def test_a_piece_goes_to_who_has_waited_longest() -> None:
    """Pullers of one key are served in the order in which they began to wait."""
    shelf = Shelf()
    pulls: BatchQueue[str, str] = BatchQueue(shelf.supply)
    first = asyncio.create_task(pulls.puller("a").pull())
    await ack()
    second = asyncio.create_task(pulls.puller("a").pull())
    await ack()

    shelf.pieces["a"] = ["one"]
    pulls.kick()
    await ack()

    assert first.result() == "one"
    assert not second.done()
    pulls.close()
    assert await second is None


async def test_keys_do_not_wait_for_each_other() -> None:
    """A puller gets its own key's pieces, one without a key gets any."""
    shelf = Shelf()
    pulls: BatchQueue[str, str] = BatchQueue(shelf.supply)
    a = asyncio.create_task(pulls.puller("a").pull())
    b = asyncio.create_task(pulls.puller("b").pull())
    either = asyncio.create_task(pulls.puller(None).pull())
    await ack()

    shelf.pieces = {"b": ["for b"], "c": ["for any"]}
    pulls.kick()
    await ack()

    assert (b.result(), either.result(), a.done()) == ("for b", "for any", False)
    pulls.close()
    assert await a is None


async def test_the_supply_is_asked_once_for_those_who_wait_for_the_same() -> None:
    """A hundred idle instances of a model cost one question per kick."""
    shelf = Shelf()
    pulls: BatchQueue[str, str] = BatchQueue(shelf.supply)
    waiting = [asyncio.create_task(pulls.puller("a").pull()) for _ in range(100)]
    await ack()
    before = shelf.asked

    pulls.kick()

    assert shelf.asked == before + 1
    pulls.close()
    assert await asyncio.gather(*waiting) == [None] * 100


async def test_a_cancelled_puller_takes_no_piece_with_it() -> None:
    """Pieces pass over a puller that has gone while it waited."""
    shelf = Shelf()
    pulls: BatchQueue[str, str] = BatchQueue(shelf.supply)
    gone = asyncio.create_task(pulls.puller("a").pull())
    await ack()
    gone.cancel()
    await ack()
    there = asyncio.create_task(pulls.puller("a").pull())
    await ack()

    shelf.pieces["a"] = ["one"]
    pulls.kick()

    assert await there == "one"


async def test_after_the_close_what_is_left_is_pulled_and_then_nothing() -> None:
    """Closing loses no piece."""
    shelf = Shelf()
    pulls: BatchQueue[str, str] = BatchQueue(shelf.supply)
    puller = pulls.puller("a")
    shelf.pieces["a"] = ["one", "two"]

    pulls.close()
    await pulls.ended()

    assert [await puller.pull() for _ in range(3)] == ["one", "two", None]


async def test_a_released_puller_takes_what_was_held_back() -> None:
    """It is the last to ask for its key: what waits for company would wait for ever."""
    shelf = Shelf()
    shelf.later["a"] = ["one", "two"]
    pulls: BatchQueue[str, str] = BatchQueue(shelf.supply)
    puller = pulls.puller("a")
    waiting = asyncio.create_task(puller.pull())
    await ack()
    assert not waiting.done()

    puller.release()

    assert await waiting == "one"
    assert [await puller.pull(), await puller.pull()] == ["two", None]


async def test_an_instance_that_is_free_early_hurries() -> None:
    """Whoever waits until a moment gets what is there as soon as it is idle."""
    shelf = Shelf()
    pulls: BatchQueue[str, str] = BatchQueue(
        lambda key, ask: None if ask.close_at_us else shelf.supply(key, ask)
    )
    puller = pulls.puller("a")
    shelf.pieces["a"] = ["one"]
    waiting = asyncio.create_task(puller.pull(close_at_us=2000))
    await ack()
    assert (waiting.done(), pulls.due_us(1000), pulls.due_us(2000)) == (False, 2000, None)

    puller.hurry()

    assert await waiting == "one"
