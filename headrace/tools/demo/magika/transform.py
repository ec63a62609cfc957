"""Conversion of a file's bytes to the input of the magika model, as in the package magika.

The model gets the first `beg_size` and the last `end_size` bytes of a file, without leading and
trailing blanks, filled up with `padding_token`. The sizes come from magika's own configuration,
which is beside this file. After `Magika._extract_features_from_seekable` of magika 1.0, "features
extraction v2" (Apache License 2.0).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import Code, Rejected

SIZES = json.loads((Path(__file__).parent / "config.min.json").read_text(encoding="utf-8"))


def transform(payload: bytes, content_type: str) -> dict[str, npt.NDArray[np.int32]]:
    """`bytes`: INT32 [1, beg_size + end_size]. Any content type is taken: the model tells.

    Raises:
        Rejected: `INVALID_REQUEST`: too few bytes; magika does not ask its model about these.
    """
    first = payload[: SIZES["block_size"]].lstrip()
    least = SIZES["min_file_size_for_dl"]
    if len(first) < least:
        raise Rejected.mismatch(
            Code.INVALID_REQUEST,
            "payload",
            expected=f"at least {least} bytes after leading blanks",
            got=str(len(first)),
        )
    last = payload[-SIZES["block_size"] :].rstrip()
    row = np.full((1, SIZES["beg_size"] + SIZES["end_size"]), SIZES["padding_token"], np.int32)
    beginning = np.frombuffer(first, np.uint8)[: SIZES["beg_size"]]
    end = np.frombuffer(last, np.uint8)[-SIZES["end_size"] :]
    row[0, : len(beginning)] = beginning
    row[0, row.shape[1] - len(end) :] = end
    return {"bytes": row}
