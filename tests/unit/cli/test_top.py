"""`headrace top`: what two answers of a process make."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest

from headrace.cli.outcome import Exit
from headrace.cli.top import StatusInterval, tables
from tests.support.command_line import Call
from tests.support.tree import ROOT

URL = "http://127.0.0.1:8080"
Answer = dict[str, Any]
Edit = Callable[[Answer], None]


def documented(edit: Edit | None = None) -> Answer:
    """The answer that the page about health shows, after `edit`."""
    text = (ROOT / "docs" / "health.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(\{\n  \"version\".*?)```", text, flags=re.DOTALL)
    answer = dict(msgspec.json.decode(example))
    if edit:
        edit(answer)
    return answer


def two_seconds_later(answer: Answer) -> None:
    """64 requests in 2 batches have been answered, one of them too late."""
    answer["uptime_s"] += 2.0
    totals = answer["totals"]
    totals["requests"][0]["count"] += 63
    late = {"model": "digits", "version": "1", "outcome": "expired", "code": "DEADLINE_EXCEEDED"}
    totals["requests"].append(late | {"count": 1})
    totals["rows"][0]["count"] += 64
    totals["runs"][0]["count"] += 2
    totals["times"]["request_duration"][0]["count"] += 64
    totals["times"]["request_duration"][0]["seconds"] += 0.32
    totals["times"]["compute_duration"] = [
        {"model": "digits", "version": "1", "count": 2, "seconds": 0.002}
    ]


def change(edit: Edit = two_seconds_later) -> StatusInterval:
    """Return the difference between the documented answer and the edited one."""
    return StatusInterval(documented(), documented(edit))


def cells(shown: StatusInterval, title: str) -> list[dict[str, str]]:
    """The rows of the table whose second heading is `title`, by heading."""
    blocks = "\n".join(tables({URL: shown})).split("\n\n")
    (block,) = [block for block in blocks if re.split(r"  +", block)[1] == title]
    heads, *rows = block.splitlines()
    starts = [found.start() for found in re.finditer(r"(?<=  )\S|^\S", heads)]
    ends = [*starts[1:], None]
    return [
        {
            heads[start:end].strip(): row[start:end].strip()
            for start, end in zip(starts, ends, strict=True)
        }
        for row in rows
    ]


def test_top_rates_are_between_two_status_reads() -> None:
    """Requests answered before the first read do not count."""
    (row,) = cells(change(), "state")

    assert (row["answers/s"], row["not ok/s"], row["rows/s"], row["runs/s"]) == (
        "32",
        "0",
        "32",
        "1",
    )
    assert (row["total ms"], row["run ms"]) == ("5.00", "1.00")


def test_top_shows_no_rates_after_first_read() -> None:
    """Rates need two reads; gauges such as the backlog need one."""
    first = StatusInterval({}, documented())

    assert cells(first, "state")[0]["answers/s"] == "-"
    assert cells(first, "topic")[0]["backlog"] == "1,200"


def test_top_shows_no_rates_across_restart() -> None:
    """Counters that begin anew would make rates below zero."""

    def restart(answer: Answer) -> None:
        answer |= {"started_at": "2026-02-01T00:00:00.000Z", "uptime_s": 1.0}

    assert cells(change(restart), "state")[0]["answers/s"] == "-"


def test_top_shows_answers_by_version() -> None:
    """A version that failed has no answers, and shows its reason."""

    def add_version(answer: Answer) -> None:
        two_seconds_later(answer)
        failed = {"name": "digits", "version": "2", "state": "failed", "reason": "no such file"}
        answer["models"].append(failed)

    first, second = cells(change(add_version), "model")

    assert (first["answers/s"], second["answers/s"]) == ("32", "0")
    assert (first["names"], second["names"]) == ("default, canary", "")
    assert second["remarks"] == "no such file"


@pytest.mark.parametrize(
    ("edit", "state"),
    [
        ({}, "ready"),
        ({"ready": {"ready": False, "reason": "no broker"}}, "ready: no broker"),
        ({"live": {"live": False, "reason": "reader: 61 s"}}, "ready: reader: 61 s"),
        ({"phase": "draining", "ready": {"ready": False, "reason": ""}}, "draining"),
    ],
)
def test_top_shows_reason_of_unready_process(edit: Answer, state: str) -> None:
    """The phase, and beside it what keeps the process from being live and ready."""
    assert cells(change(lambda answer: answer.update(edit)), "state")[0]["state"] == state


def test_top_shows_unreachable_process_with_reason() -> None:
    """The process is listed beside those that answer."""
    shown = "\n".join(
        tables({URL: change(), "http://gone": StatusInterval({}, {"error": "no answer"})})
    )

    assert re.search(r"^http://gone +no answer$", shown, flags=re.MULTILINE)


def test_top_shows_newest_error_first_and_escaped() -> None:
    """A message of a caller cannot control the terminal."""

    def fail(answer: Answer) -> None:
        entry = answer["last_errors"][0]
        newer = {"time": "2026-02-01T00:00:00.000Z", "reason": "\x1b[2Jgone\n", "trace_id": None}
        answer["last_errors"].append(entry | newer)

    newest, older = cells(change(fail), "time")

    assert newest["reason"] == r"\x1b[2Jgone\n"
    assert (older["reason"], older["trace"]) == (
        "INVALID_TENSOR 0/4711",
        "4bf92f3577b34da6a3ce929d0e0e4736",
    )


@pytest.mark.parametrize("address", ["127.0.0.1:8080", "http://[::1", "http://127.0.0.1:99999"])
def test_top_refuses_invalid_address(call: Call, address: str) -> None:
    """The message says what was expected."""
    ended = call("top", "--once", "--url", address)

    assert ended.exit_code == 2
    assert f"expected http://HOST:PORT, got '{address}'" in " ".join(
        ended.stderr.replace("│", " ").split()
    )


def test_top_refuses_interval_that_is_no_number(call: Call) -> None:
    """It would wait for no time that there is."""
    assert call("top", "--interval", "nan").exit_code == Exit.USAGE


@pytest.mark.parametrize("body", ['{"status": "ok"}', "[1, 2]"])
def test_top_shows_that_another_program_answers(call: Call, body: str) -> None:
    """Its answer is JSON as well, and none of a process."""

    class OtherProgram(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), OtherProgram) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = call("top", "--once", "--interval", "0.1", "--url", url)
        server.shutdown()
        serving.join()

    assert result.exit_code == Exit.FAILED
    assert "answered as another program" in result.stdout
