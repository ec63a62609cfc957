"""The blocking client's thread: opened again, forked, and left while threads call it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.client import Client, ClientClosed, InferenceTimeout, SyncClient
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo
from tests.support.conditions import DEADLINE_S


@asynccontextmanager
async def opened() -> AsyncIterator[Client]:
    """A client of a log that no service reads."""
    topics = [TopicInfo(f"headrace.{name}", 1, {}) for name in ("requests", "responses")]
    async with MemoryLog() as log:
        await log.create_topics(topics, replication_factor=1)
        async with Client(log=log) as client:
            yield client


def call(client: SyncClient) -> None:
    """A call that nobody answers."""
    client.infer_raw("model", b"payload", "text/plain", timeout_s=0.01)


def test_blocking_client_entered_again_is_open_again() -> None:
    """It was left before, which must not end it at once."""
    client = SyncClient.of(opened)
    for _ in range(2):
        with client, pytest.raises(InferenceTimeout):
            call(client)


def test_call_in_forked_process_is_refused() -> None:
    """The thread with the connection is not in the child, where a call would wait forever."""
    forking = multiprocessing.get_context("fork")
    receiving, sending = forking.Pipe(duplex=False)

    def call_in_child() -> None:
        try:
            call(client)
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            sending.send(repr(error))

    with SyncClient.of(opened) as client:
        child = forking.Process(target=call_in_child)
        child.start()
        refusal = receiving.recv() if receiving.poll(DEADLINE_S) else "the child waits"
        child.kill()
        child.join()
        with pytest.raises(InferenceTimeout):
            call(client)
    assert "ClientClosed" in refusal
    assert "forked" in refusal


def test_calls_while_blocking_client_closes_are_refused() -> None:
    """No thread hangs, or sees an error of the event loop that ends."""
    errors: list[Exception] = []
    client = SyncClient.of(opened)

    def call_until_refused() -> None:
        while True:
            try:
                call(client)
            except InferenceTimeout:
                continue
            except Exception as error:  # noqa: BLE001 - which one it is, is the question
                errors.append(error)
                return

    threads = [threading.Thread(target=call_until_refused) for _ in range(8)]
    with client:
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [ClientClosed] * len(threads)
