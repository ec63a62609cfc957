"""The demo: four services in one process, two models, an open loop of requests, and a check of
every answer against the truth.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import as_file, files
from pathlib import Path

from headrace.config import KafkaSettings, ModelSettings, Settings, TelemetrySettings, make_settings
from headrace.models.backends.onnx_session import require_onnx_runtime
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.demo.magika_model import MagikaModel, find_magika
from headrace.tools.demo.questions import Questions, SampleFile, load_digits, load_samples
from headrace.tools.demo.report import live_line
from headrace.tools.demo.tally import Result, Tally
from headrace.tools.demo.traffic import Due, Traffic, plan_load
from headrace.tools.local_kafka import LocalKafka

SEED = 1


async def run_demo(seconds: float, say: Callable[[str], None], *, kafka: bool = False) -> Result:
    """Send requests for `seconds`, wait for the last answers, and return the totals.

    Args:
        seconds: how long requests are sent; preparation and waiting are extra.
        say: receives progress messages.
        kafka: use a separate Kafka on this machine, instead of the embedded log.

    Raises:
        BrokerUnavailable: this machine cannot run a Kafka.
        ConfigurationError: an environment variable is wrong, or ONNX Runtime is not installed.
    """
    require_onnx_runtime()
    magika = find_magika()
    if magika is None:
        say("the package magika is not installed (extra `demo`): digits only, no files")
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        repository = Path(folder)
        samples, capacity_per_s = await asyncio.to_thread(_prepare, repository, magika)
        async with _broker(say, kafka=kafka) as broker:
            questions = Questions(load_digits(), samples)
            load = plan_load(questions, seconds, SEED, file_capacity_per_s=capacity_per_s)
            labels = magika.labels if magika else ()
            return await send_all(demo_settings(repository, broker), load, labels)


def _prepare(repository: Path, magika: MagikaModel | None) -> tuple[list[SampleFile], float]:
    """Fill the model repository, load the sample files, and measure how many of them per second
    this machine can classify; no files without magika.
    """
    with as_file(files("headrace.tools.demo") / "models") as models:
        shutil.copytree(models, repository, dirs_exist_ok=True)
    if magika is None:
        return [], 0.0
    magika.add_to(repository)
    return load_samples(), magika.measure_rows_per_s()


@asynccontextmanager
async def _broker(
    say: Callable[[str], None], *, kafka: bool
) -> AsyncIterator[KafkaSettings | None]:
    if not kafka:
        yield None
        return
    say("starting Kafka (fetched once, 45 MB)")
    async with LocalKafka() as cluster:
        yield KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)


def demo_settings(repository: Path, kafka: KafkaSettings | None = None) -> Settings:
    """Return settings with the demo's own log and models, overriding the environment."""
    own = {
        "kafka": kafka,
        "models": ModelSettings(repository=repository),
        "telemetry": TelemetrySettings(http_port=0, log_level="warning"),
    }
    return make_settings({}).model_copy(update=own)


async def send_all(settings: Settings, load: Iterable[Due], file_labels: Sequence[str]) -> Result:
    """Run the four services, send all questions of a plan, and stop the services.

    `file_labels` are the names of the magika model's outputs, in their order.
    """
    tally = Tally()
    async with open_log(settings) as log:
        # The embedded log already has the topics.
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with running(Pipeline(settings, log)):
            async with asyncio.TaskGroup() as tasks:
                showing = tasks.create_task(_show(tally), name="view")
                await Traffic(log, settings, tally, file_labels).run(load)
                showing.cancel()
            return tally.result()


async def _show(tally: Tally) -> None:
    """Print a line each second."""
    started_s = time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        print(live_line(tally.live_stats(time.monotonic(), started_s)), flush=True)  # noqa: T201
