"""`headrace top`: shows running processes in a terminal, repeatedly."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Literal, Protocol
from urllib.parse import urlsplit

import click
import msgspec

from headrace.cli.event_loop import run
from headrace.cli.outcome import Unsuccessful
from headrace.cli.top_figures import ProcessFigures, figures_of
from headrace.cli.top_status import Status
from headrace.cli.top_view import Table, fit, lines, tables

if TYPE_CHECKING:
    from aiohttp import ClientSession
    from rich.console import Group

DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 5.0

_decoder = msgspec.json.Decoder(Status)


class _Show(Protocol):
    def __call__(self, processes: Sequence[ProcessFigures]) -> None: ...


def _addresses(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    for url in value:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise click.BadParameter(f"expected http://HOST:PORT, got {url!r}", ctx, param)
    return tuple(dict.fromkeys(url.rstrip("/") for url in value))


@click.command()
@click.option(
    "--url",
    "urls",
    multiple=True,
    default=(DEFAULT_URL,),
    show_default=True,
    callback=_addresses,
    metavar="URL",
    help="A process to look at: its telemetry.http_host and http_port. Can be repeated.",
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Take two looks, print what they make, and end.")
@click.option("--json", "as_json", is_flag=True, help="Write a line of JSON for each look.")
def command(urls: tuple[str, ...], interval_s: float, once: bool, as_json: bool) -> None:
    """Show running processes: rates, waits, batches, models, budgets and the last errors.

    Ends with Ctrl-C, or with --once, whose exit code is 1 when a process does not answer.
    """
    with ExitStack() as stack:
        show = _as_json if as_json else _opened_view(stack, once=once)
        try:
            answered = run(_watch(urls, interval_s, show, once=once))
        except KeyboardInterrupt:
            return
    if not answered:
        raise Unsuccessful


async def _watch(urls: Sequence[str], interval_s: float, show: _Show, *, once: bool) -> bool:
    """Poll and show repeatedly; with `once`, return after one round whether all
    processes answered.
    """
    async with aclosing(_looks(urls, interval_s)) as looks:
        first = await anext(looks)
        if not once:  # with a single output the rates are needed as well, which take two polls
            show(first)
        async for processes in looks:
            show(processes)
            if once:
                return not any(each.fault for each in processes)
    return True


async def _looks(
    urls: Sequence[str], interval_s: float
) -> AsyncGenerator[Sequence[ProcessFigures], None]:
    from aiohttp import ClientSession, ClientTimeout

    before: dict[str, Status] = {}
    async with ClientSession(timeout=ClientTimeout(total=TIMEOUT_S)) as session:
        while True:
            answers = await asyncio.gather(*(_ask(session, url) for url in urls))
            found = []
            for url, answer in zip(urls, answers, strict=True):
                if isinstance(answer, str):
                    found.append(ProcessFigures(url=url, fault=answer))
                else:
                    found.append(figures_of(url, before.get(url), answer))
                    before[url] = answer
            yield found
            await asyncio.sleep(interval_s)


async def _ask(session: ClientSession, url: str) -> Status | str:
    """Return the status of a process, or the reason why there is none."""
    from aiohttp import ClientError

    try:
        async with session.get(f"{url}/status") as answer:
            if answer.status != 200:
                return f"expected status 200 from /status, got {answer.status}"
            return _decoder.decode(await answer.read())
    except TimeoutError:
        return f"no answer within {TIMEOUT_S:g} s"
    except ClientError as error:
        return f"no answer: {error}"
    except msgspec.MsgspecError as error:
        return f"/status is not what this version of headrace reads: {error}"


# --- showing -----------------------------------------------------------------------------------


def _as_json(processes: Sequence[ProcessFigures]) -> None:
    click.echo(msgspec.json.encode({"processes": processes}))


def _as_lines(processes: Sequence[ProcessFigures]) -> None:
    click.echo("\n".join([*lines(tables(processes)), ""]))


def _opened_view(stack: ExitStack, *, once: bool) -> _Show:
    """Return a view that stays in place, on a terminal with rich; otherwise lines."""
    if once or not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        return _as_lines
    from rich.live import Live

    live = stack.enter_context(Live(screen=True, auto_refresh=False))

    def show(processes: Sequence[ProcessFigures]) -> None:
        live.update(draw(fit(tables(processes), live.console.height)), refresh=True)

    return show


def draw(shown: Sequence[Table]) -> Group:
    """Return the tables in rich's form: a line for each row, every cell as text."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn: list[RichTable | Text] = []
    for table in shown:
        made = RichTable(title=table.title or None, title_justify="left", box=None, pad_edge=False)
        for column, head in enumerate(table.heads):
            justify: Literal["left", "right"] = "right" if column in table.numeric else "left"
            made.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis")
        for row in table.rows:
            made.add_row(*map(Text, row))
        drawn += (made, Text("")) if table.title else (made,)
    return Group(*drawn)
