"""Fixtures of the tests on a GPU, which skip a test where there is none."""

from __future__ import annotations

import pytest

from headrace.device.cuda import CudaDevice
from headrace.errors import ConfigurationError


@pytest.fixture
def cuda() -> CudaDevice:
    """The first GPU."""
    try:
        return CudaDevice(0)
    except ConfigurationError as error:
        pytest.skip(str(error))
