"""The fixture `headrace_client` for pytest: `pytest_plugins = ["headrace.testing.pytest_plugin"]`.

The directory of the models is the ini option `headrace_models` (`models` by default), relative to
pytest's root directory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.client import SyncClient
from headrace.testing.serving import serving_sync


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option."""
    parser.addini("headrace_models", "Directory of the models that are served.", default="models")


@pytest.fixture(scope="session")
def headrace_client(pytestconfig: pytest.Config) -> Iterator[SyncClient]:
    """Serve the models for the whole session, and give a blocking client of them."""
    repository = pytestconfig.rootpath / pytestconfig.getini("headrace_models")
    with serving_sync(repository) as client:
        yield client
