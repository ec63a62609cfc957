"""The comparison of the doors with other servers: its load, its ratios and its targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.door_load import (
    Dialect,
    Expected,
    LoadOrder,
    LoadReport,
    Way,
    WrongAnswer,
    content_length,
    exchanges,
    frame,
    measure,
)
from benchmarks.door_servers import APART, BENTOML, EMBEDDED, LITSERVE, MLSERVER, WITH_KAFKA
from benchmarks.doors import (
    DoorResults,
    DoorRun,
    answers_of,
    door_run,
    render,
    targets,
)
from benchmarks.subjects import digits
from tests.support.gateways import gateway_of


def run(per_s: float = 100.0, p50_ms: float = 1.0, wrong: int = 0) -> DoorRun:
    """Return a measurement."""
    return DoorRun(per_s, p50_ms, 2.0, 50.0, [50.0], 0.0, 0.2, wrong, "", 0.1)


def results(*runs: tuple[str, Way, int, list[DoorRun]]) -> DoorResults:
    """Return results with a run of each door in each round."""
    found = DoorResults("2026-01-01", {}, {}, 1, 1.0)
    for server, way, concurrency, rounds in runs:
        for number, each in enumerate(rounds):
            found.add(server, way, concurrency, number, each)
    return found


def order(way: Way, dialect: Dialect = Dialect.OPEN_INFERENCE, address: str = "") -> LoadOrder:
    """Return a load of one distinct request, whose answer is 1."""
    return LoadOrder(
        way=way,
        dialect=dialect,
        address=address,
        path="/v2/models/digits/infer",
        namespace="",
        rows=[[0.0, 1.0]],
        labels=[1],
        probabilities=[[0.25, 0.75]],
        concurrency=4,
        skip_s=0.0,
        window_s=0.05,
    )


# --- the load -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [Way.BINARY, Way.JSON, Way.GRPC])
async def test_load_gets_right_answers_from_a_gateway(way: Way, tmp_path: Path) -> None:
    """Each answer of the real model through the real doors is compared, and none is wrong."""
    model = digits(tmp_path)
    rows, labels, probabilities = answers_of(model)
    async with gateway_of(model.repository, grpc_port=0) as served:
        port = served.doors.ports["grpc" if way is Way.GRPC else "http"]
        asked = order(way, address=str(port))
        asked.rows, asked.labels, asked.probabilities = rows, labels, probabilities

        report = await measure(asked)

    assert (report.wrong, report.example) == (0, "")
    assert served.counted("OK" if way is Way.GRPC else 200) >= report.answered > 0


async def test_load_counts_other_answers_as_wrong(tmp_path: Path) -> None:
    """A model that answers something else is found out."""
    model = digits(tmp_path)
    rows, labels, probabilities = answers_of(model)
    async with gateway_of(model.repository) as served:
        asked = order(Way.BINARY, address=str(served.doors.ports["http"]))
        asked.rows, asked.probabilities = rows, probabilities
        asked.labels = [(label + 1) % 10 for label in labels]

        report = await measure(asked)

    assert report.answered == 0
    assert report.wrong > 0
    assert "expected label" in report.example


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        (Dialect.OBJECT, b'{"label": 1, "probabilities": [0.25, 0.75]}'),
        (Dialect.ROWS, b"[[1.0, 0.25, 0.75]]"),
        (
            Dialect.OPEN_INFERENCE,
            b'{"outputs": [{"name": "label", "data": [1]}, '
            b'{"name": "probabilities", "data": [0.25, 0.75]}]}',
        ),
    ],
)
def test_json_of_each_server_is_understood(dialect: Dialect, answer: bytes) -> None:
    """The right answer passes in the form of each server, another one does not."""
    (exchange,) = exchanges(order(Way.JSON, dialect))

    exchange.check(answer)
    with pytest.raises(WrongAnswer):
        exchange.check(answer.replace(b"0.75", b"0.65"))


def test_answer_may_round_differently() -> None:
    """A run of several rows adds in another order."""
    Expected(1, [0.25, 0.75]).check(1, [0.250001, 0.749999])


def test_answer_of_other_size_is_wrong() -> None:
    """Probabilities that are missing are not equal."""
    with pytest.raises(WrongAnswer):
        Expected(1, [0.25, 0.75]).check(1, [0.25])


def test_content_length_is_read_in_any_case() -> None:
    """Names of headers have no case."""
    assert content_length(b"HTTP/1.1 200 OK\r\nCONTENT-length: 12\r\nDate: now") == 12


def test_frame_has_the_layout_of_http2() -> None:
    """RFC 9113, section 4.1: 24 bits of length, kind, flags, 32 bits of stream."""
    assert frame(8, 1, 3, b"abcd") == b"\x00\x00\x04\x08\x01\x00\x00\x00\x03abcd"


# --- the report -----------------------------------------------------------------------------------


def test_door_run_divides_by_answers() -> None:
    """10 answers in 2 s, 3 ms of the server's time and 1 ms of the broker's."""
    report = LoadReport(2.0, 10, 0, "", 1.0, 2.0, cpu_s=0.5)

    found = door_run(report, [0.002, 0.001], 0.001, 0.3)

    assert found.per_s == 5.0
    assert found.cpu_us == pytest.approx(300.0)
    assert found.cpu_each_us == pytest.approx([200.0, 100.0])
    assert found.broker_us == pytest.approx(100.0)
    assert found.load_cores == 0.25


def test_ratio_is_of_the_same_rounds() -> None:
    """A slow round of the machine is slow for both: 2, 3 and 2 times, not 30 of 100."""
    found = results(
        (EMBEDDED, Way.BINARY, 32, [run(200), run(30), run(400)]),
        (MLSERVER, Way.JSON, 32, [run(100), run(10), run(200)]),
    )

    assert found.ratio(EMBEDDED, Way.BINARY, 32, MLSERVER, Way.JSON) == 2.0


def test_ratio_without_the_other_is_none() -> None:
    """A server that did not start is compared with nothing."""
    found = results((EMBEDDED, Way.BINARY, 32, [run()]))

    assert found.ratio(EMBEDDED, Way.BINARY, 32, MLSERVER, Way.JSON) is None


def test_targets_are_met_or_missed() -> None:
    """Twice MLServer is enough, 0.9 times LitServe is not; over gRPC it is the same."""
    found = results(
        (EMBEDDED, Way.BINARY, 32, [run(200)]),
        (WITH_KAFKA, Way.GRPC, 32, [run(150)]),
        (MLSERVER, Way.JSON, 32, [run(100)]),
        (LITSERVE, Way.JSON, 32, [run(222)]),
        (BENTOML, Way.JSON, 32, [run(100)]),
        (WITH_KAFKA, Way.BINARY, 1, [run(p50_ms=4.5)]),
        (APART, Way.GRPC, 1, [run(p50_ms=3.5)]),
        (WITH_KAFKA, Way.KAFKA, 1, [run(p50_ms=2.0)]),
    )

    met = {target.text.split(";")[0]: target.met for target in targets(found)}

    assert met == {
        f"{EMBEDDED}, HTTP, binary, 32 at once: 2.00 times MLServer over HTTP": True,
        f"{EMBEDDED}, HTTP, binary, 32 at once: 0.90 times LitServe over HTTP": False,
        f"{EMBEDDED}, HTTP, binary, 32 at once: 2.00 times BentoML over HTTP": True,
        f"{WITH_KAFKA}, gRPC, 32 at once: 1.50 times MLServer over HTTP": False,
        f"{WITH_KAFKA}, gRPC, 32 at once: 0.68 times LitServe over HTTP": False,
        f"{WITH_KAFKA}, gRPC, 32 at once: 1.50 times BentoML over HTTP": True,
        f"{WITH_KAFKA}, unloaded: HTTP, binary +2.50 ms against the Kafka client": False,
        f"{APART}, unloaded: gRPC +1.50 ms against the Kafka client": True,
        "0 wrong answers": True,
        "the load kept at most 0.20 cores busy": True,
    }


def test_table_tells_the_programs_apart() -> None:
    """The gateway's processor time is there by itself, and the ratio to the same protocol."""
    apart = run(300)
    apart.cpu_us, apart.cpu_each_us = 70.0, [40.0, 30.0]
    found = results((APART, Way.GRPC, 32, [apart]), (MLSERVER, Way.GRPC, 32, [run(100)]))

    lines = render(found).splitlines()

    assert lines[0] == "32 at once:"
    assert "| 300 | 3.00 | 1.00 | 2.00 | 70 (gateway 40, stages 30) |" in lines[-2]
