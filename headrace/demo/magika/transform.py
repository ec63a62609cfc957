"""From the bytes of a file to the input of the magika model, as the package magika makes it.

The model sees the first `beg_size` and the last `end_size` bytes of a file, without the blanks
before and behind, and `padding_token` where there are too few. Sizes come from magika's own
configuration, which lies beside this file. After `Magika._extract_features_from_seekable` of
magika 1.0, "features extraction v2" (Apache License 2.0).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import Code, Rejected

CONFIG_FILE = "config.min.json"


class Transform:
    """Turns a payload into the model's inputs.

    Raises:
        KeyError, OSError: the configuration is not there or lacks a size.
    """

    def __init__(self) -> None:
        config = json.loads((Path(__file__).parent / CONFIG_FILE).read_text(encoding="utf-8"))
        self._block_bytes: int = config["block_size"]
        self._beginning: int = config["beg_size"]
        self._end: int = config["end_size"]
        self._padding: int = config["padding_token"]
        self._min_bytes: int = config["min_file_size_for_dl"]

    def __call__(self, payload: memoryview, content_type: str) -> dict[str, npt.NDArray[np.int32]]:
        """`bytes`: INT32 [1, 2048].

        Raises:
            Rejected: `INVALID_REQUEST`: too few bytes; magika does not ask its model about these.
        """
        first = bytes(payload[: self._block_bytes]).lstrip()
        if len(first) < self._min_bytes:
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "payload",
                expected=f"at least {self._min_bytes} bytes after leading blanks",
                got=str(len(first)),
            )
        last = bytes(payload[-self._block_bytes :]).rstrip()
        row = np.full((1, self._beginning + self._end), self._padding, dtype=np.int32)
        beginning = np.frombuffer(first, np.uint8)[: self._beginning]
        end = np.frombuffer(last, np.uint8)[-self._end :]
        row[0, : len(beginning)] = beginning
        row[0, row.shape[1] - len(end) :] = end
        return {"bytes": row}
