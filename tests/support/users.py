"""What another user may do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def closed_to_us(directory: Path) -> Iterator[None]:
    """Take from this process every right to a directory while the context lasts."""
    mode = directory.stat().st_mode
    user = os.geteuid()
    directory.chmod(0)
    if user == 0:  # whom no mode keeps out
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(mode)
