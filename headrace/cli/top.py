"""`headrace top`: show running processes in a terminal, from their `/status`.

Rates and means are computed from the totals in two successive answers; everything else is shown as
`/status` has it. `docs/health.md` describes the fields.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import click

from headrace.cli.event_loop import run
from headrace.cli.options import FiniteRange
from headrace.cli.outcome import Unsuccessful
from headrace.printable import printable

if TYPE_CHECKING:
    from aiohttp import ClientSession

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
TIMEOUT_S = 5.0
SHOWN_ERRORS = 8
MIB = 1024 * 1024

Status: TypeAlias = dict[str, Any]
"""The body of `/status`, or `{"error": reason}` from a process that did not answer."""


class StatusInterval(NamedTuple):
    """Two successive answers of one process. Across a restart nothing is known of its rates."""

    before: Status
    after: Status

    def growth(self, name: str, field: str = "count", **labels: str) -> float:
        """Return the growth of a total, summed over the labels that are not given."""
        return _total(self.after, name, field, labels) - _total(self.before, name, field, labels)

    def per_s(self, name: str, **labels: str) -> float | None:
        """Return the growth of a total per second; None if there is only one answer."""
        elapsed_s: float = self.after["uptime_s"] - self.before.get("uptime_s", 0.0)
        if elapsed_s <= 0 or self.before.get("started_at") != self.after["started_at"]:
            return None
        return self.growth(name, **labels) / elapsed_s

    def mean_ms(self, name: str) -> float | None:
        """Return the mean of a duration; None if nothing was measured between the answers."""
        if not self.per_s(name):
            return None
        return self.growth(name, "seconds") / self.growth(name) * 1e3


def _total(status: Status, name: str, field: str, labels: Mapping[str, str]) -> float:
    totals = status.get("totals", {})
    entries = totals.get(name) or totals.get("times", {}).get(name, [])
    return float(sum(each[field] for each in entries if labels.items() <= each.items()))


# --- tables --------------------------------------------------------------------------------------


def tables(changes: Mapping[str, StatusInterval]) -> Iterator[str]:
    """Yield the lines that show all processes, by URL."""
    headings = ["process", "state", "stages", "answers/s", "not ok/s", "rows/s", "runs/s"]
    headings += ["run ms", "queue ms", "total ms", "waiting", "loop lag ms"]
    yield from _lines(headings, [_process(url, change) for url, change in changes.items()])
    answered = {url: change for url, change in changes.items() if "error" not in change.after}
    headings = [
        "process",
        "topic",
        "backlog",
        "MiB in flight",
        "of",
        "oldest s",
        "drain s",
        "commit s",
    ]
    sources = [
        _source(url, source) for url, each in answered.items() for source in each.after["sources"]
    ]
    yield from _lines([*headings, "remarks"], sources)
    models = [
        _model(url, each, model) for url, each in answered.items() for model in each.after["models"]
    ]
    headings = ["process", "model", "names", "state", "answers/s", "MiB", "remarks"]
    yield from _lines(headings, models)
    errors = [(url, error) for url, each in answered.items() for error in each.after["last_errors"]]
    newest = sorted(errors, key=lambda entry: str(entry[1]["time"]), reverse=True)[:SHOWN_ERRORS]
    rows = [_error(url, error) for url, error in newest]
    yield from _lines(["process", "time", "event", "reason", "trace"], rows)


def _process(url: str, change: StatusInterval) -> list[str]:
    status = change.after
    if "error" in status:
        return [url, status["error"]]
    answers, ok = change.per_s("requests"), change.per_s("requests", outcome="ok")
    waiting = status["waiting"] or {"requests": None}
    fault = status["live"]["reason"] or status["ready"]["reason"]
    return [
        url,
        f"{status['phase']}: {fault}" if fault else status["phase"],
        ",".join(status["stages"]),
        _number(answers),
        _number(None if answers is None or ok is None else answers - ok),
        _number(change.per_s("rows")),
        _number(change.per_s("runs")),
        _number(change.mean_ms("compute_duration"), 2),
        _number(change.mean_ms("queue_wait"), 2),
        _number(change.mean_ms("request_duration"), 2),
        _number(waiting["requests"]),
        _number(status["event_loop_lag_s"] * 1e3, 1),
    ]


def _source(url: str, source: Status) -> list[str]:
    commit = source["commit"]
    paused = f"paused: {source['paused']}" if source["paused"] else ""
    return [
        url,
        source["topic"],
        _number(source["backlog_records"]),
        _number(source["in_flight_bytes"] / MIB, 1),
        _number(source["limit_bytes"] / MIB),
        _number(source["oldest_age_s"], 1),
        _number(source["time_to_drain_s"], 1),
        _number(commit["age_s"] if commit["commits"] else None, 1),
        "; ".join(filter(None, (paused, commit["last_failure"]))),
    ]


def _model(url: str, change: StatusInterval, model: Status) -> list[str]:
    name, version = model["name"], model["version"]
    taken = model.get("memory_bytes")
    taken_mib = sum(map(sum, taken.values())) / MIB if taken else None
    remarks = (model.get(field) for field in ("reason", "batching_off", "contradiction"))
    return [
        url,
        f"{name}/{version}",
        ", ".join([*(["default"] if model.get("is_default") else []), *model.get("labels", [])]),
        model["state"],
        _number(change.per_s("requests", model=name, version=version)),
        _number(taken_mib, 1),
        "; ".join(filter(None, remarks)),
    ]


def _error(url: str, error: Status) -> list[str]:
    record = "/".join(str(error[name]) for name in ("partition", "offset") if name in error)
    reason = error["reason"] or f"{error.get('code', '')} {record}".strip()
    return [url, error["time"], error["event"], reason, error["trace_id"] or ""]


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table, if it has rows, and a blank line."""
    if not rows:
        return
    grid = [[printable(cell) for cell in row] for row in (headings, *rows)]
    complete = [row for row in grid if len(row) == len(headings)]
    widths = [max(map(len, column)) for column in zip(*complete, strict=True)]
    for row in grid:
        yield "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=False)
        ).rstrip()
    yield ""


# --- the command ---------------------------------------------------------------------------------


def _addresses(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    for url in value:
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port != 0)
        except ValueError:  # of the port as well
            fits = False
        if not fits:
            raise click.BadParameter(f"expected http://HOST:PORT, got {url!r}", ctx, param)
    return tuple(dict.fromkeys(url.rstrip("/") for url in value))


@click.command()
@click.option(
    "--url",
    "urls",
    multiple=True,
    default=("http://127.0.0.1:8080",),
    show_default=True,
    callback=_addresses,
    metavar="URL",
    help="A process to show: its telemetry.http_host and http_port. Can be repeated.",
)
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two requests to each process.",
)
@click.option("--once", is_flag=True, help="Print the tables once, and end.")
@click.option(
    "--key-file", type=_FILE, help="A file with an API key or a token, if the processes want one."
)
@click.option("--ca-file", type=_FILE, help="Certificates in PEM that sign those of the processes.")
@click.option("--cert-file", type=_FILE, help="A certificate to show them, and its key, in PEM.")
def command(
    urls: tuple[str, ...],
    interval_s: float,
    once: bool,
    key_file: Path | None,
    ca_file: Path | None,
    cert_file: Path | None,
) -> None:
    """Show running processes: rates, waits, backlogs, models and the last errors.

    Ends with Ctrl-C, or with --once, whose exit code is 1 when a process does not answer.
    """
    try:
        login = _open_login(key_file, ca_file, cert_file)
    except (OSError, ValueError) as error:  # of the files, in PEM or not
        raise click.ClickException(f"--key-file, --ca-file, --cert-file: {error}") from error
    try:
        all_answered = run(_watch(urls, interval_s, login, once=once))
    except KeyboardInterrupt:
        return
    if not all_answered:
        raise Unsuccessful


class _Access(NamedTuple):
    """Headers of a login, and the authorities that may sign the certificates of processes."""

    headers: dict[str, str]
    context: ssl.SSLContext


def _open_login(key_file: Path | None, ca_file: Path | None, cert_file: Path | None) -> _Access:
    """Read the files. Raises `OSError` or `ValueError`: one of them cannot be used."""
    headers: dict[str, str] = {}
    if key_file is not None:
        headers["Authorization"] = f"Bearer {key_file.read_text(encoding='ascii').strip()}"
    context = ssl.create_default_context(cafile=ca_file)
    if cert_file is not None:
        context.load_cert_chain(cert_file, password="")  # else OpenSSL would ask for one
    return _Access(headers, context)


async def _watch(urls: Sequence[str], interval_s: float, login: _Access, *, once: bool) -> bool:
    """Show all processes until cancelled; with `once`, return whether all of them answered."""
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    before: dict[str, Status] = {}
    async with ClientSession(
        timeout=ClientTimeout(total=TIMEOUT_S),
        headers=login.headers,
        connector=TCPConnector(ssl=login.context),
    ) as session:
        while True:
            answers = await asyncio.gather(*(_fetch(session, url) for url in urls))
            now = dict(zip(urls, answers, strict=True))
            if before or not once:  # the rates need two answers
                _print(before, now, in_place=not once and sys.stdout.isatty())
                if once:
                    return not any("error" in status for status in answers)
            before = now
            await asyncio.sleep(interval_s)


async def _fetch(session: ClientSession, url: str) -> Status:
    from aiohttp import ClientError

    try:
        async with session.get(f"{url}/status") as answer:
            if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                return {"error": f"answered {answer.status} {answer.reason}; see --key-file"}
            answer.raise_for_status()
            status = await answer.json()
    except TimeoutError:
        return {"error": f"no answer within {TIMEOUT_S:g} s"}
    except OSError as error:  # aiohttp's own text names its TLS settings
        return {"error": f"no answer: {os.strerror(error.errno) if error.errno else error}"}
    except (ClientError, ValueError) as error:
        return {"error": f"no answer: {error}"}
    if not isinstance(status, dict) or "uptime_s" not in status:
        return {"error": "answered as another program: expected telemetry.http_port of Headrace"}
    return status


def _print(before: Mapping[str, Status], now: Mapping[str, Status], *, in_place: bool) -> None:
    lines = list(tables({url: StatusInterval(before.get(url, {}), now[url]) for url in now}))
    if in_place:
        width, height = shutil.get_terminal_size()
        lines = [line[:width] for line in lines[: height - 1]]
        click.clear()
    click.echo("\n".join(lines))
