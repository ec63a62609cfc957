"""Streams between stages: ends that are noticed, and pieces that are pulled."""

from __future__ import annotations

import asyncio

from headrace.transport.channels import BatchQueue, Demand, Writers


async def ack() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


class Stage:
    """A stage that keeps what it is sent."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def is_full(self) -> bool:
        return len(self.received) >= 2

    def send_nowait(self, chunk: int) -> None:
        self.received.append(chunk)

    async def send(self, chunk: int) -> None:
        self.send_nowait(chunk)


async def test_chunk_sent_is_received_in_same_turn() -> None:
    """A writer calls its stage."""
    stage = Stage()
    writer = Writers(stage).writer()
    await writer.send(1)
    assert not writer.is_full()
    writer.send_nowait(2)

    assert stage.received == [1, 2]
    assert writer.is_full()


async def test_channel_ends_when_all_writers_are_closed() -> None:
    """Closing one twice does not close another."""
    writers: Writers[int] = Writers(Stage())
    first, second = writers.writer(), writers.writer()
    closed = asyncio.create_task(writers.closed())
    first.close()
    first.close()
    await ack()
    assert not closed.done()

    second.close()
    await closed


class Shelf:
    """Pieces by key; those under `later` are held back from who will come again."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[str]] = {}
        self.later: dict[str, list[str]] = {}
        self.asked = 0

    def supply(self, key: str | None, demand: Demand) -> str | None:
        self.asked += 1
        stores = (self.pieces, self.later) if demand.is_last else (self.pieces,)
        for store in stores:
            for name in [key] if key is not None else list(store):
                if store.get(name):
                    return store[name].pop(0)
        return None


async def test_batch_goes_to_consumer_waiting_longest() -> None:
    """Consumers of one key are served in the order in which they began to wait."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply)
    first = asyncio.create_task(batch_queue.consumer("a").pull())
    await ack()
    second = asyncio.create_task(batch_queue.consumer("a").pull())
    await ack()

    shelf.pieces["a"] = ["one"]
    batch_queue.notify()
    await ack()

    assert first.result() == "one"
    assert not second.done()
    batch_queue.close()
    assert await second is None


async def test_consumer_of_one_key_does_not_wait_for_another() -> None:
    """A consumer gets its own key's pieces, one without a key gets any."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply)
    a = asyncio.create_task(batch_queue.consumer("a").pull())
    b = asyncio.create_task(batch_queue.consumer("b").pull())
    either = asyncio.create_task(batch_queue.consumer(None).pull())
    await ack()

    shelf.pieces = {"b": ["for b"], "c": ["for any"]}
    batch_queue.notify()
    await ack()

    assert (b.result(), either.result(), a.done()) == ("for b", "for any", False)
    batch_queue.close()
    assert await a is None


async def test_supply_is_asked_once_for_consumers_of_same_key() -> None:
    """A hundred idle instances of a model cost one question per `notify`."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply)
    waiting = [asyncio.create_task(batch_queue.consumer("a").pull()) for _ in range(100)]
    await ack()
    before = shelf.asked

    batch_queue.notify()

    assert shelf.asked == before + 1
    batch_queue.close()
    assert await asyncio.gather(*waiting) == [None] * 100


async def test_cancelled_consumer_loses_no_batch() -> None:
    """Pieces pass over a consumer that has gone while it waited."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply)
    gone = asyncio.create_task(batch_queue.consumer("a").pull())
    await ack()
    gone.cancel()
    await ack()
    there = asyncio.create_task(batch_queue.consumer("a").pull())
    await ack()

    shelf.pieces["a"] = ["one"]
    batch_queue.notify()

    assert await there == "one"


async def test_closed_queue_hands_out_rest_and_ends() -> None:
    """Closing loses no piece."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply)
    consumer = batch_queue.consumer("a")
    shelf.pieces["a"] = ["one", "two"]

    batch_queue.close()
    await batch_queue.ended()

    assert [await consumer.pull() for _ in range(3)] == ["one", "two", None]


async def test_released_consumer_gets_held_back_batch() -> None:
    """It is the last to ask for its key: what waits for company would wait for ever."""
    shelf = Shelf()
    shelf.later["a"] = ["one", "two"]
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply)
    consumer = batch_queue.consumer("a")
    waiting = asyncio.create_task(consumer.pull())
    await ack()
    assert not waiting.done()

    consumer.release()

    assert await waiting == "one"
    assert [await consumer.pull(), await consumer.pull()] == ["two", None]


async def test_early_free_instance_hurries_supply() -> None:
    """A consumer that waits until a time gets the waiting requests as soon as it is idle."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(
        lambda key, ask: None if ask.close_at_us else shelf.supply(key, ask)
    )
    consumer = batch_queue.consumer("a")
    shelf.pieces["a"] = ["one"]
    waiting = asyncio.create_task(consumer.pull(close_at_us=2000))
    await ack()
    assert (waiting.done(), batch_queue.due_us(1000), batch_queue.due_us(2000)) == (
        False,
        2000,
        None,
    )

    consumer.now_idle()

    assert await waiting == "one"


async def test_batch_run_at_once_leaves_consumer_waiting() -> None:
    """The first piece is run by the supplier; the consumer gets the next one."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply)
    ran: list[str] = []

    def run_now(piece: str) -> bool:
        ran.append(piece)
        return True

    waiting = asyncio.create_task(batch_queue.consumer("a").wait(run_now))
    await ack()
    shelf.pieces["a"] = ["first"]
    batch_queue.notify()
    assert ran == ["first"]
    await ack()
    assert not waiting.done()

    shelf.pieces["a"] = ["second", "third", "fourth"]
    batch_queue.notify()

    assert ran == ["first", "second"]
    assert await waiting == "third"
    assert shelf.pieces["a"] == ["fourth"]


async def test_batch_that_cannot_run_at_once_goes_to_consumer() -> None:
    """No other piece is offered before it."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply)
    waiting = asyncio.create_task(batch_queue.consumer("a").wait(lambda _: False))
    await ack()
    shelf.pieces["a"] = ["first", "second"]
    batch_queue.notify()

    assert await waiting == "first"


async def test_released_or_closed_consumer_does_not_wait() -> None:
    """Whether it was released before or while it waits."""
    batch_queue: BatchQueue[str, str] = BatchQueue(Shelf().supply)
    consumer = batch_queue.consumer("a")
    waiting = asyncio.create_task(consumer.wait(lambda _: True))
    await ack()
    consumer.release()
    assert await waiting is None
    assert await consumer.wait() is None

    other = batch_queue.consumer("a")
    batch_queue.close()
    assert await other.wait() is None


async def test_stopped_consumer_leaves_batches_to_another() -> None:
    """Whether it waits or pulls: even what is already there is not for it."""
    shelf = Shelf()
    batch_queue: BatchQueue[str, str] = BatchQueue(shelf.supply, lambda key: bool(shelf.pieces))
    stopped, other = batch_queue.consumer("a"), batch_queue.consumer("a")
    waiting = asyncio.create_task(stopped.pull())
    await ack()
    stopped.stop()
    assert await waiting is None

    shelf.pieces["a"] = ["one"]
    batch_queue.put_first("a", "first")
    assert batch_queue.has_waiting("a")
    assert [stopped.pull_nowait(), await stopped.pull(), await stopped.wait()] == [None] * 3
    assert [await other.pull(), await other.pull()] == ["first", "one"]


async def test_batches_put_first_can_be_taken_back() -> None:
    """They are gone then, and nothing waits."""
    batch_queue: BatchQueue[str, str] = BatchQueue(Shelf().supply)
    batch_queue.put_first("a", "one")
    assert batch_queue.take_first("a") == ["one"]
    assert batch_queue.take_first("a") == []
    assert not batch_queue.has_waiting("a")
