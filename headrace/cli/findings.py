"""What a check of `headrace doctor` has to say."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Health(StrEnum):
    """How a finding is meant."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        subject: `configuration`, `broker`, `rights`, `topics`, `models` or `device`.
        text: what was found.
        mend: what to do about it; empty when nothing is wrong.
    """

    subject: str
    health: Health
    text: str
    mend: str = ""
