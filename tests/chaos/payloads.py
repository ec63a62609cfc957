"""Requests whose inputs are made in child processes, and requests and answers that are in a store.

A payload is the number of its request, with what is to become of it in the child. The model doubles
the number in every column, so that an answer with the bytes of another request is seen, in a record
or in a store.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.history import Sent
from tests.chaos.store import ChaosStore
from tests.chaos.workload import KEYS, PARTITIONS, Question, add_models, ask, request_of

MODEL = "files"
TRANSFORM = '''"""Becomes a number in each column, or ends or holds this process."""

import os
import signal
import time
from pathlib import Path

import numpy as np

FATES = Path({fates!r})


def transform(payload, content_type):
    fate, number, columns = payload.decode().split()
    if fate == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fate == "crash-once":
        try:
            os.close(os.open(FATES / number, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os._exit(1)
    if fate == "hang":
        time.sleep(3600)
    if fate == "bad":
        raise ValueError(number)
    return {{"x": np.full((1, int(columns)), float(number))}}
'''
SERVED_MODEL = '''"""Doubles the first columns, after a pause in which others are in flight."""

import time

import numpy as np


class Model:
    inputs = [("x", "FP64", (-1, -1))]
    outputs = [("y", "FP64", (-1, -1))]

    def run(self, inputs):
        time.sleep(0.003)
        return {"y": inputs["x"][:, :600] * 2.0}
'''
MAX_EXECUTION_S = 8.0
"""More than nemeses hold a process for: only what hangs by itself exceeds it."""
CONFIG = f"""backend = "python"
transform = "python"
max_batch_size = 8
max_queue_delay_ms = 5
max_execution_s = {MAX_EXECUTION_S}
"""
COLUMNS = (4, 300, 9000)
"""Answers of the first are in their records, and those of the others in the store; inputs of the
last come from a child in shared memory."""
CLAIMED_COLUMNS = 2000
ABOVE_BYTES = 2000
FATES = {"crash": 2, "hang": 2, "crash-once": 4}
"""Payloads that end or hold their child, of 2,000 requests, and at least one of each: the child's
successor takes seconds to start on a busy machine.
"""
ANSWERED_DEADLINE_S = 240.0
CLAIM_TIMEOUT_MS = 60_000
"""The store is never unavailable for so long."""


def add_payload_models(repository: Path) -> None:
    """Write the models of the other workload, and one with a transform."""
    add_models(repository)
    directory = repository / MODEL
    (directory / "1").mkdir(parents=True)
    fates = repository.parent / "fates"
    fates.mkdir()
    (directory / "1" / "model.py").write_text(SERVED_MODEL)
    (directory / "transform.py").write_text(TRANSFORM.format(fates=str(fates)))
    (directory / "model.toml").write_text(CONFIG)


def payload_settings(store: ChaosStore) -> dict[str, Any]:
    """Return the settings of children and of the store, by section."""
    return {
        "ingest": {"transform_workers": 2, "transform_isolation": "process"},
        "claims": {
            "allowed": [f"{store.url}/in"],
            "max_bytes": 1024 * 1024,
            "timeout_ms": CLAIM_TIMEOUT_MS,
        },
        "answers": {"claim_store": f"{store.url}/out", "claim_above_bytes": ABOVE_BYTES},
    }


def asking(seed: int, requests: int, store: ChaosStore) -> Callable[[int], Question]:
    """Return what makes the question of each number; some put an object into the store."""
    drawn = [fate for fate, count in FATES.items() for _ in range(max(1, count * requests // 2000))]
    numbers = random.Random(f"fates {seed}").sample(range(requests), len(drawn))
    fates = dict(zip(numbers, drawn, strict=True))

    def ask_one(number: int) -> Question:
        rng = random.Random(f"{seed} {number}")
        kind = rng.random()
        if number not in fates and kind < 0.2:
            return ask(number, rng)
        partition, key = rng.randrange(PARTITIONS), f"key-{rng.randrange(KEYS)}"
        if number not in fates and kind < 0.35:
            x = np.full((rng.randint(1, 2), CLAIMED_COLUMNS), float(number))
            claim = store.put(_place(number), request_of(MODEL, "x", x))
            headers = ((b"x-model", MODEL.encode()), (b"x-claim", claim))
            return Question(number, partition, key, None, ("ok",), rng.random() < 0.1, headers)
        fate, statuses = "none", ("ok",)
        if number in fates:
            fate = fates[number]
            statuses = ("ok",) if fate == "crash-once" else ("MODEL_FAILED",)
        elif kind < 0.37:
            fate, statuses = "bad", ("INVALID_REQUEST",)
        payload: bytes | None = f"{fate} {number} {rng.choice(COLUMNS)}".encode()
        about = [(b"x-model", MODEL.encode()), (b"content-type", b"text/plain")]
        if kind > 0.75:
            assert payload is not None
            padded = payload.ljust(rng.randrange(100, 50_000))
            about.append((b"x-claim", store.put(_place(number), padded)))
            payload = None
        replies = rng.random() < 0.1
        return Question(number, partition, key, payload, statuses, replies, tuple(about))

    return ask_one


def excuse(sent: Sent, store: ChaosStore) -> Sent:
    """Let a request be refused of whose object the store gave out wrong bytes."""
    if _place(sent.number) not in store.spoiled:
        return sent
    return sent._replace(statuses=tuple(dict.fromkeys((*sent.statuses, "INVALID_REQUEST"))))


def _place(number: int) -> str:
    return f"/in/{number}"
