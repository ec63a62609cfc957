"""`python -m headrace.tools.local_kafka`: a Kafka in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click

from headrace.errors import ConfigurationError, HeadraceError
from headrace.tools.local_kafka.broker import LocalKafka


@click.command()
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--port",
    default=9092,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Where the first node listens, with the others above; 0 picks free ports.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Where the data is kept; without it, it goes when the broker goes.",
)
def main(nodes: int, port: int, directory: Path | None) -> None:
    """Run a local Kafka until Ctrl-C."""
    asyncio.run(_serve(LocalKafka(directory, nodes=nodes, port=port)))


async def _serve(cluster: LocalKafka) -> None:
    """Run a cluster until a signal; raises `BrokerFailed` if a node ends on its own."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        async with cluster:
            click.echo(cluster.bootstrap_servers)
            click.echo(_greeting(cluster), err=True)
            await cluster.watch()
    except asyncio.CancelledError:
        click.echo("Stopped.", err=True)


def _greeting(cluster: LocalKafka) -> str:
    pids = ", ".join(str(cluster.pid(each)) for each in cluster.node_ids)
    return (
        f"Kafka serves at {cluster.bootstrap_servers} (process {pids}); Ctrl-C stops it.\n"
        "In another terminal:\n"
        f"  export HEADRACE_KAFKA__BOOTSTRAP_SERVERS={cluster.bootstrap_servers}\n"
        "  headrace topics create && headrace run"
    )


if __name__ == "__main__":
    try:
        main(prog_name="python -m headrace.tools.local_kafka")
    except HeadraceError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
