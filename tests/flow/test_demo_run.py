"""The demo as a whole, on the embedded log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.tools.demo.demo import demo_settings, run_demo, send_all
from headrace.tools.demo.magika_model import find_magika
from headrace.tools.demo.questions import FILES, Questions, SampleFile, load_digits, load_samples
from headrace.tools.demo.traffic import Due
from tests.support.command_line import Call


@pytest.fixture
def switch_interval() -> Iterator[None]:
    """Undo what the command sets for its process."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


async def test_demo_answers_every_request_without_faults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A short run has answers for all groups, dead letters, batches, no faults."""
    said: list[str] = []
    result = await run_demo(1.5, said.append)
    assert result.faults == ()
    assert all(group.answered == group.sent > 0 for group in result.groups)
    assert {each.code: each.answers == each.dead_letters for each in result.errors} == {
        "INVALID_TENSOR": True,
        "INVALID_REQUEST": True,
        "UNKNOWN_MODEL": True,
        "DEADLINE_EXCEEDED": False,
    }
    sizes = {each.model: each.sizes for each in result.batches}
    assert max(sizes["digits"]) > 1
    assert "in flight" in capsys.readouterr().out


def test_demo_without_magika_shows_digits_alone(
    call: Call, monkeypatch: pytest.MonkeyPatch, switch_interval: None
) -> None:
    """`headrace demo`: a missing package is said on stderr, and costs the files alone."""
    monkeypatch.setitem(sys.modules, "magika", None)  # as if it were not installed
    ended = call("demo", "--seconds", "1")
    assert ended.exit_code == 0
    assert ended.stderr.startswith("headrace: the package magika is not installed")
    assert "Every request was answered once" in ended.stdout
    assert FILES not in ended.stdout


async def test_demo_files_get_labels_of_magika_package(tmp_path: Path) -> None:
    """Each label equals the package's prediction, after topics, transform and batches."""
    reference = pytest.importorskip("magika").Magika()
    model = find_magika()
    assert model is not None
    model.add_to(tmp_path)
    samples = [
        SampleFile(str(reference.identify_bytes(content).prediction.dl.label), content)
        for _, content in load_samples()
    ]
    questions = Questions(load_digits(), samples)
    at_once = Due(0.0, tuple(questions.file() for _ in samples))
    result = await send_all(demo_settings(tmp_path), [at_once], model.labels)
    (group,) = result.groups
    assert (group.right, group.rows, result.faults) == (len(samples), len(samples), ())
