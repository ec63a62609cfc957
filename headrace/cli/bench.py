"""`headrace bench MODEL`: puts load on a pipeline, and finds its bottleneck."""

from __future__ import annotations

import json
import mimetypes
from pathlib import Path
from typing import Any, BinaryIO

import click

from headrace.cli.event_loop import run
from headrace.cli.infer_inputs import parse_inputs
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say
from headrace.cli.settings import pass_settings
from headrace.config import Settings

UNDER_WAY = 1024


@click.command()
@click.argument("model")
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="PER_S",
    help="Requests a second, as independent callers send them.",
)
@click.option(
    "--saturate", is_flag=True, help="As many requests as it takes, --under-way at a time."
)
@click.option(
    "--under-way",
    type=click.IntRange(min=1),
    default=UNDER_WAY,
    show_default=True,
    help="With --saturate: unanswered requests at any time.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=10.0,
    show_default=True,
    help="How long requests are sent.",
)
@click.option(
    "--warm-up",
    "warm_up_s",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Seconds of them that are not counted.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    callback=parse_inputs,
    metavar="NAME[:DATATYPE]=@FILE.npy|JSON",
    help="One input of the request; repeat it for more.",
)
@click.option("--file", type=click.File("rb"), help="A payload for the model's transform.")
@click.option(
    "--content-type", metavar="T", help="Content type of --file.  [default: by the file's name]"
)
@click.option(
    "--capture",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Requests of a capture file, in turns.",
)
@click.option(
    "--version",
    metavar="V",
    help="Name this version in each request.  [default: none, the newest answers]",
)
@click.option(
    "--encoding",
    type=click.Choice(["msgpack", "json"]),
    default="msgpack",
    show_default=True,
    help="Of requests with --input, or made up.",
)
@click.option(
    "--url",
    default="",
    metavar="URL",
    help="A process of the pipeline (telemetry.http_port), to see what cores it keeps busy.",
)
@click.option("--json", "in_json", is_flag=True, help="Write JSON.")
@pass_settings
def command(
    settings: Settings,
    /,
    *,
    in_json: bool,
    saturate: bool,
    file: BinaryIO | None,
    content_type: str | None,
    encoding: str,
    **given: Any,
) -> None:
    """Put load on MODEL and say how long answers take, where their time goes, and what binds.

    With a broker in the settings, a running Headrace answers. Without one, the four services run in
    this process, and share a core with the load. Requests are one row that is made up by the
    model's signature, unless --input, --file or --capture says otherwise.

    With --rate, latency counts from when a request was due, whether it could be sent then or not.
    Exit code 1 when an answer is missing.
    """
    if saturate == (given["rate"] is not None):
        raise click.UsageError("give either --rate or --saturate")
    if sum(map(bool, (given["inputs"], file, given["capture"]))) > 1:
        raise click.UsageError("give at most one of --input, --file and --capture")
    if content_type and file is None:
        raise click.UsageError("--content-type goes with --file")
    payload = None
    if file is not None:
        guessed = content_type or mimetypes.guess_type(file.name)[0]
        payload = (file.read(), guessed or "application/octet-stream")
    from headrace.cli.bench_report import as_fields, as_text
    from headrace.cli.bench_run import Asked, measure
    from headrace.cli.progress import progress

    asked = Asked(file=payload, as_json=encoding == "json", **given)
    with progress() as shown:
        facts, measured = run(measure(settings, asked, shown))
    fields = as_fields(facts, measured)
    say(json.dumps(fields, indent=2) if in_json else as_text(fields))
    if measured.unanswered:
        raise Unsuccessful
