"""`headrace.testing`: models served inside a test's own process."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from headrace.client import ClientClosed, InferenceError, SyncClient
from headrace.errors import ConfigurationError
from headrace.testing import serving, serving_sync
from tests.support.models import add_version, digits
from tests.support.tree import ROOT

pytest_plugins = ["pytester"]
PIXELS = np.ones((2, 64), np.float32)
PAGE = ROOT / "docs" / "testing.md"
DEMO = ROOT / "headrace" / "tools" / "demo"
SCORES = np.repeat(np.arange(10, dtype=np.float32)[None] * 64, 2, axis=0)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with the model `digits`."""
    repository = tmp_path / "models"
    add_version(repository, "digits", 1, digits())
    return repository


async def test_serve_answers_client(models: Path) -> None:
    """The context gives a client that all four services answer."""
    async with serving(models) as client:
        response = await client.infer("digits", {"pixels": PIXELS})
    np.testing.assert_allclose(response.outputs["scores"], SCORES)


async def test_serve_ignores_broker_of_environment(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests never reach the broker that a user's environment names."""
    monkeypatch.setenv("HEADRACE_KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:1")
    async with serving(models) as client:
        response = await client.infer("digits", {"pixels": PIXELS})
    assert response.model_name == "digits"


async def test_error_inside_serve_is_raised_unwrapped(models: Path) -> None:
    """A failed assertion of a user's test is not wrapped in an exception group."""
    with pytest.raises(AssertionError, match="the user's own"):
        async with serving(models):
            raise AssertionError("the user's own")


async def test_serve_without_repository_raises_configuration_error(tmp_path: Path) -> None:
    """A directory that does not exist is refused with its name."""
    with pytest.raises(ConfigurationError, match="nothing-here"):
        async with serving(tmp_path / "nothing-here"):
            pass


def test_blocking_client_gets_same_answer_as_async_client(models: Path) -> None:
    """`serving_sync` needs no event loop of the caller's."""
    with serving_sync(models) as client:
        response = client.infer("digits", {"pixels": PIXELS})
    np.testing.assert_allclose(response.outputs["scores"], SCORES)


def test_blocking_client_raises_error_with_its_code(models: Path) -> None:
    """A refusal of the services is an `InferenceError` with its code."""
    with serving_sync(models) as client, pytest.raises(InferenceError) as caught:
        client.infer("letters", {"pixels": PIXELS})
    assert caught.value.code == "UNKNOWN_MODEL"


def test_threads_sharing_blocking_client_get_their_own_answers(models: Path) -> None:
    """Calls of several threads each get their own answer."""
    answers: dict[int, float] = {}
    with serving_sync(models) as client:

        def call(number: int) -> None:
            rows = np.full((1, 64), number, np.float32)
            answers[number] = client.infer("digits", {"pixels": rows}).outputs["scores"][0, 1]

        threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {number: 64.0 * number for number in range(20)}


def test_closed_blocking_client_refuses_calls(models: Path) -> None:
    """A call before entering or after leaving names the reason."""
    with serving_sync(models) as client:
        pass
    for closed in (client, SyncClient("127.0.0.1:9092")):
        with pytest.raises(ClientClosed, match="within `with`"):
            closed.infer("digits", {"pixels": PIXELS})


def test_blocking_client_without_broker_raises_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error that `Client` raises on entering reaches the caller's thread."""
    monkeypatch.delenv("HEADRACE_KAFKA__BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(ConfigurationError, match="needs a broker"), SyncClient():
        pass


def test_fixture_serves_models_of_ini_option(models: Path, pytester: pytest.Pytester) -> None:
    """A user's test gets a client from the plugin's fixture."""
    pytester.makeini(f"[pytest]\nheadrace_models = {models}")
    pytester.makepyfile(
        conftest='pytest_plugins = ["headrace.testing.pytest_plugin"]',
        test_digits="""
            import numpy as np

            def test_served_digits_model_returns_ten_scores_per_row(headrace_client):
                pixels = np.ones((1, 64), np.float32)
                response = headrace_client.infer("digits", {"pixels": pixels})
                assert response.outputs["scores"].shape == (1, 10)
        """,
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=1)


def test_page_tests_pass_as_written(pytester: pytest.Pytester) -> None:
    """The examples of docs/testing.md, those with faults included, pass with the demo's model."""
    shutil.copytree(DEMO / "models" / "digits", pytester.path / "models" / "digits")
    images = np.load(DEMO / "digits_test.npz")["pixels"]
    np.save(pytester.path / "image.npy", images[:1].astype(np.float32))
    blocks = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    pytester.makepyfile(**dict(blocks))
    pytester.makeini("[pytest]\nasyncio_mode = auto")
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=4)
