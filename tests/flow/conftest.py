"""Fixtures of several files of flow tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.python_models import add_gated_model, shut_gate


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Path]:
    """A repository with a model that doubles `x`, and whose runs wait for `GATE`."""
    add_gated_model(tmp_path)
    with shut_gate():
        yield tmp_path
