"""The page of log events and the events of the code."""

from __future__ import annotations

import re

from headrace.telemetry.logs import Event
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "log-events.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z_.]+)` \| ", re.MULTILINE)


def test_log_events_page_lists_exactly_events_of_code() -> None:
    """No event is missing on the page or there twice, and none is there that is never logged."""
    assert sorted(ROW.findall(PAGE)) == sorted(Event)
