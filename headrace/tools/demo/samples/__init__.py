"""Files of many kinds, made on the spot, whose kind is known because we made them.

The label of a sample says what the file is, by magika's name for it; what a model says of it is
another matter. Everything is drawn from a seed, except that Python sources, their compiled code
and ELF files are those of the running interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from headrace.tools.demo.samples import binaries, documents, sources
from headrace.tools.demo.samples.words import Words


class Sample(NamedTuple):
    """A file: `label` is what it is, `content` its bytes."""

    label: str
    content: bytes


def kinds() -> tuple[str, ...]:
    """The labels of all kinds that can be made on this machine, sorted."""
    return tuple(sorted(_makers()))


def _makers() -> dict[str, Callable[[Words], bytes]]:
    return {**documents.MAKERS, **sources.MAKERS, **binaries.makers()}


def make_samples(count: int, seed: int) -> list[Sample]:
    """`count` files, the kinds in turn, in an order drawn from the seed."""
    random = Random(seed)  # noqa: S311 - samples, not secrets
    words = Words(random)
    makers = sorted(_makers().items())
    samples = [
        Sample(label, make(words))
        for label, make in (makers[index % len(makers)] for index in range(count))
    ]
    random.shuffle(samples)
    return samples
