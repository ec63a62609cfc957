"""Generated files of many kinds, with known labels.

The label of a sample is its true kind, by magika's name for it; a model's answer may differ.
Everything is generated from a seed, except that Python sources, their compiled code and ELF files
are those of the running interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from headrace.tools.demo.samples import binaries, documents, sources
from headrace.tools.demo.samples.words import Words


class Sample(NamedTuple):
    """A file: its true `label`, and its bytes `content`."""

    label: str
    content: bytes


def kinds() -> tuple[str, ...]:
    """Return the labels of all kinds that can be made on this machine, sorted."""
    return tuple(sorted(_makers()))


def _makers() -> dict[str, Callable[[Words], bytes]]:
    return {**documents.MAKERS, **sources.MAKERS, **binaries.makers()}


def make_samples(count: int, seed: int) -> list[Sample]:
    """Return `count` files, cycling through the kinds, in an order that depends on the seed."""
    random = Random(seed)  # noqa: S311 - samples, not secrets
    words = Words(random)
    makers = sorted(_makers().items())
    samples = [
        Sample(label, make(words))
        for label, make in (makers[index % len(makers)] for index in range(count))
    ]
    random.shuffle(samples)
    return samples
