"""Import rules that import-linter's contracts cannot say; the others are in pyproject.toml."""

from __future__ import annotations

import grimp
import pytest


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Who imports whom in the package, and which packages from outside."""
    return grimp.build_graph("headrace", include_external_packages=True, cache_dir=None)


def test_the_graph_sees_the_services(graph: grimp.ImportGraph) -> None:
    """The link from the package to services/ is followed, or no rule about them would bite."""
    assert graph.find_children("headrace.services") >= {
        f"headrace.services.{stage}" for stage in ("ingest", "batcher", "executor", "responder")
    }


# It starts brokers and asks them, as any client would, whether they serve.
_OUTSIDE_THE_ADAPTER = frozenset({"headrace.tools.local_kafka.broker"})


def test_only_the_kafka_adapter_imports_aiokafka(graph: grimp.ImportGraph) -> None:
    """Only modules of `headrace.log.kafka` know aiokafka."""
    importers = graph.find_modules_that_directly_import("aiokafka")

    assert importers
    outside = {name for name in importers if not name.startswith("headrace.log.kafka.")}
    assert outside == _OUTSIDE_THE_ADAPTER
