"""Findings of the checks of `headrace doctor`."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """Result of a check.

    Attributes:
        subject: `configuration`, `broker`, `rights`, `topics`, `models` or `device`.
        text: what was found.
        fix: the fix; empty if nothing is wrong.
    """

    subject: str
    health: Severity
    text: str
    fix: str = ""
