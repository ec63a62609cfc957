"""`headrace bench MODEL`: puts load on a pipeline, and finds its bottleneck."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import click
from numpy.typing import NDArray

from headrace.cli.event_loop import run
from headrace.cli.infer_inputs import parse_inputs
from headrace.cli.options import POSITIVE, FiniteRange, json_option
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say
from headrace.cli.payloads import guess_content_type
from headrace.cli.progress import Progress
from headrace.cli.settings import pass_settings
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.log.port import Log, TopicPartition
from headrace.models.version import ModelVersion
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.logs import configure_logging
from headrace.tools.bench.advice import Facts, advise
from headrace.tools.bench.load import Load, LoadPlan, LoadRequest
from headrace.tools.bench.measured import LoadResult
from headrace.tools.bench.payloads import from_arrays, from_capture, from_file, made_up
from headrace.tools.histogram import Histogram
from headrace.tools.simulate.scenarios import latest_models
from headrace.topics import Topic

# --- the run -------------------------------------------------------------------------------------


URL_TIMEOUT_S = 5.0
SHOW_EVERY_S = 0.2
CPU_SECONDS = "process_cpu_seconds_total "


class BenchOptions(NamedTuple):
    """Parameters of a measurement; see `headrace.cli.bench`.

    Attributes:
        rate: requests per second; None to saturate.
        file: content and content type.
        url: of a process to observe; empty for none.
    """

    model: str
    version: str | None
    rate: float | None
    in_flight: int
    seconds: float
    warm_up_s: float
    as_json: bool
    inputs: dict[str, NDArray[Any]]
    file: tuple[bytes, str] | None
    capture: Path | None
    url: str


async def measure(
    settings: Settings, options: BenchOptions, shown: Progress
) -> tuple[Facts, LoadResult]:
    """Run the load and gather the results.

    Raises:
        ConfigurationError: topics or models are missing, or nothing answers at the URL.
        LogUnavailable: no broker answers.
    """
    known = latest_models(settings, None).get(options.model)
    payloads = await _payloads(options, known)
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(open_log(settings))
        if settings.kafka is None:
            configure_logging("warning")
            await stack.enter_async_context(running(Pipeline(settings, log)))
        plan = await _plan_load(settings, log, options)
        cores = _Cores(options.url)
        await cores.begin()
        load = Load(log, plan, payloads)
        showing = asyncio.create_task(_show(shown, load.measured, plan.seconds), name="progress")
        try:
            if options.rate is None:
                measured = await load.closed_loop(options.in_flight)
            else:
                measured = await load.open_loop(options.rate)
        finally:
            showing.cancel()
        kept_busy = await cores.end()
    offered_per_s = None
    if options.rate is not None:  # the rate actually reached by so short a process
        offered_per_s = measured.counted / (plan.seconds - plan.skip_s)
    facts = _facts(measured, offered_per_s, known, payloads)
    return facts._replace(cores=kept_busy), measured


async def _show(shown: Progress, measured: LoadResult, seconds: float) -> None:
    began_s = time.monotonic()
    while True:
        part = (time.monotonic() - began_s) / seconds
        shown.show(part, f"{measured.answered} of {measured.sent} requests answered")
        await asyncio.sleep(SHOW_EVERY_S)


async def _payloads(options: BenchOptions, known: ModelVersion | None) -> Sequence[LoadRequest]:
    if options.capture is not None:
        return await from_capture(options.capture)
    if options.file is not None:
        return [from_file(options.model, options.version, *options.file)]
    if options.inputs:
        given = from_arrays(options.model, options.version, options.inputs, as_json=options.as_json)
        return [given]
    if known is None:
        raise ConfigurationError(
            f"{options.model}: expected it in models.repository, to make requests from its "
            "signature, or requests by --input, --file or --capture"
        )
    return [made_up(known, options.version, as_json=options.as_json)]


async def _plan_load(settings: Settings, log: Log, options: BenchOptions) -> LoadPlan:
    names = [settings.topic(topic) for topic in (Topic.REQUESTS, Topic.RESPONSES)]
    found = await log.describe_topics(names)
    sized: list[TopicPartition] = []
    for name in names:
        topic = found[name]
        if topic is None:
            raise ConfigurationError(f"topic {name}: expected it; `headrace topics create`")
        sized.append(TopicPartition(name, topic.partitions))
    return LoadPlan(
        sized[0], sized[1], options.seconds, skip_s=min(options.warm_up_s, options.seconds / 2)
    )


def _facts(
    measured: LoadResult,
    offered_per_s: float | None,
    known: ModelVersion | None,
    payloads: Sequence[LoadRequest],
) -> Facts:
    rows = measured.rows_per_batch
    runs_per_s = measured.per_s / rows if rows else 0.0
    failed = measured.answered - measured.statuses["ok"]
    return Facts(
        offered_per_s=offered_per_s,
        answered_per_s=measured.per_s,
        failed_share=failed / max(1, measured.answered),
        queue_s=measured.queue.mean_s,
        batch_s=measured.batch.mean_s,
        compute_s=measured.compute.mean_s,
        outside_s=measured.outside.mean_s,
        rows_per_batch=rows,
        computing=runs_per_s * measured.compute.mean_s / (known.config.instances if known else 1),
        max_batch_size=known.max_batch_size if known else 0,
        request_bytes=sum(len(each.value) for each in payloads) // len(payloads),
        as_json=any((b"json" in value) for each in payloads for _, value in each.headers[:1]),
    )


class _Cores:
    """Number of cores that a process keeps busy, from its own metrics."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._before: tuple[float, float] = (0.0, 0.0)

    async def begin(self) -> None:
        """Take the first sample. Raises `ConfigurationError`."""
        if self._url:
            self._before = (time.monotonic(), await self._cpu_s())

    async def end(self) -> float | None:
        """Take the second sample and return the number of busy cores; None without a URL."""
        if not self._url:
            return None
        began_s, cpu_s = self._before
        return (await self._cpu_s() - cpu_s) / (time.monotonic() - began_s)

    async def _cpu_s(self) -> float:
        from aiohttp import ClientError, ClientSession, ClientTimeout

        url = f"{self._url}/metrics"
        try:
            async with (
                ClientSession(timeout=ClientTimeout(URL_TIMEOUT_S)) as session,
                session.get(url) as response,
            ):
                text = await response.text()
        except (ClientError, TimeoutError, ValueError) as error:
            raise ConfigurationError(f"{url}: expected metrics, got {error!r}") from error
        for line in text.splitlines():
            if line.startswith(CPU_SECONDS):
                return float(line.removeprefix(CPU_SECONDS))
        raise ConfigurationError(f"{url}: expected {CPU_SECONDS.strip()}, got none")


# --- output --------------------------------------------------------------------------------------


PERCENTILES = (50, 90, 99, 99.9)


def as_fields(facts: Facts, measured: LoadResult) -> dict[str, Any]:
    """Return all results, with times in milliseconds."""
    sizes = sorted(measured.batch_sizes.items())
    return {
        "sent": measured.sent,
        "answered": measured.answered,
        "unanswered": measured.unanswered,
        "duplicates": measured.duplicates,
        "answers_per_s": measured.per_s,
        "statuses": dict(measured.statuses),
        "latency_ms": _percentiles(measured.latency),
        "sent_late_ms": _percentiles(measured.lateness) if len(measured.lateness) else None,
        "mean_ms": {
            "queue": 1e3 * facts.queue_s,
            "batch": 1e3 * facts.batch_s,
            "compute": 1e3 * facts.compute_s,
            "outside": 1e3 * facts.outside_s,
        }
        if facts.rows_per_batch
        else None,  # no answer has timings
        "rows_per_batch": facts.rows_per_batch,
        "batch_sizes": [{"rows": rows, "answers_looked_into": count} for rows, count in sizes],
        "computing": facts.computing,
        "cores": facts.cores,
        "advice": [each._asdict() for each in advise(facts)],
    }


def _percentiles(histogram: Histogram) -> dict[str, float]:
    found = {f"p{percent:g}": 1e3 * histogram.percentile_s(percent) for percent in PERCENTILES}
    return found | {"max": 1e3 * histogram.max_s}


def as_text(fields: dict[str, Any]) -> str:
    """Format the fields as text."""
    return "\n".join([*_outcome(fields), "", *_times(fields)])


def _outcome(fields: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{fields['answered']} of {fields['sent']} requests answered, "
        f"{fields['answers_per_s']:,.0f} a second"
        + (f"; {fields['unanswered']} unanswered" if fields["unanswered"] else "")
        + (f"; {fields['duplicates']} answered twice" if fields["duplicates"] else "")
    )
    others = {name: count for name, count in fields["statuses"].items() if name != "ok"}
    for name, count in sorted(others.items()):
        yield f"{name}: {count}"
    if not fields["answers_per_s"]:
        return
    yield f"latency: {_shown(fields['latency_ms'])}"
    if fields["sent_late_ms"] is not None:
        yield f"sent late, which is part of it: {_shown(fields['sent_late_ms'])}"


def _shown(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {_ms(value)}" for name, value in percentiles.items())


def _times(fields: dict[str, Any]) -> Iterator[str]:
    mean = fields["mean_ms"]
    if fields["rows_per_batch"]:
        yield (
            f"mean: waiting for a batch {_ms(mean['queue'])}, computing {_ms(mean['compute'])}, "
            f"the rest of the batch {_ms(mean['batch'])}, "
            f"Kafka and decoding {_ms(mean['outside'])}"
        )
        yield (
            f"{fields['rows_per_batch']:.1f} rows in a run; the model computes "
            f"{fields['computing']:.0%} of the time"
        )
    if fields["cores"] is not None:
        yield f"{fields['cores']:.2f} cores busy"
    for advice in fields["advice"]:
        yield f"{advice['binds']}: {advice['sentence']}"


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.2f} ms"


# --- the command ---------------------------------------------------------------------------------


IN_FLIGHT = 1024


@click.command()
@click.argument("model")
@click.option(
    "--rate",
    type=POSITIVE,
    metavar="PER_S",
    help="Requests per second, as independent callers send them.",
)
@click.option("--saturate", is_flag=True, help="Keep --in-flight requests unanswered at any time.")
@click.option(
    "--in-flight",
    type=click.IntRange(min=1),
    default=IN_FLIGHT,
    show_default=True,
    help="With --saturate: number of unanswered requests.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=1),
    default=10.0,
    show_default=True,
    help="How long requests are sent.",
)
@click.option(
    "--warm-up",
    "warm_up_s",
    type=FiniteRange(min=0),
    default=1.0,
    show_default=True,
    help="Initial seconds that are not counted.",
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
    help="Send the requests of a capture file in rotation.",
)
@click.option(
    "--version",
    metavar="V",
    help="Version named by each request.  [default: none, the model's default answers]",
)
@click.option(
    "--encoding",
    type=click.Choice(["msgpack", "json"]),
    default="msgpack",
    show_default=True,
    help="Encoding of requests that are not read from a file.",
)
@click.option(
    "--url",
    default="",
    metavar="URL",
    help="URL of a process of the pipeline (telemetry.http_port), to measure its busy cores.",
)
@json_option
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
    """Load MODEL, and report latency, where the time goes, and the bottleneck.

    With a broker in the settings, a running Headrace answers. Without one, the four services run in
    this process, and share a core with the load. Each request is one row generated from the model's
    signature, unless --input, --file or --capture is given.

    With --rate, latency counts from when a request was due, whether or not it could be sent then.
    Exit code 1 if an answer is missing.
    """
    if saturate == (given["rate"] is not None):
        raise click.UsageError("give either --rate or --saturate")
    if sum(map(bool, (given["inputs"], file, given["capture"]))) > 1:
        raise click.UsageError("give at most one of --input, --file and --capture")
    if content_type and file is None:
        raise click.UsageError("--content-type goes with --file")
    payload = None
    if file is not None:
        content = file.read()
        payload = (content, content_type or guess_content_type(file.name, content))
    from headrace.cli.bench import BenchOptions, as_fields, as_text, measure
    from headrace.cli.progress import progress

    options = BenchOptions(file=payload, as_json=encoding == "json", **given)
    with progress() as shown:
        facts, measured = run(measure(settings, options, shown))
    fields = as_fields(facts, measured)
    say(json.dumps(fields, indent=2) if in_json else as_text(fields))
    if measured.unanswered:
        raise Unsuccessful
