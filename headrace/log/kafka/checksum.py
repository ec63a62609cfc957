"""The checksum of record batches, CRC-32C (RFC 3720, appendix B.4).

aiokafka's wheels compute it without the processor's instruction for it, at about 1 GB/s;
`google-crc32c` uses the instruction and takes a twentieth of the time
(docs/decisions/0027-checksums.md).
"""

from __future__ import annotations

from typing import Final

import google_crc32c
from aiokafka.record.util import calc_crc32c

from headrace.tuning import TUNING, KafkaTuning

_IS_COMPILED: Final = google_crc32c.implementation == "c"


def crc32c(content: memoryview, tuning: KafkaTuning = TUNING.kafka) -> int:
    """Return the CRC-32C of bytes."""
    # Without its compiled part the library computes in Python, a thousand times slower.
    if len(content) <= tuning.small_checksum_bytes or not _IS_COMPILED:
        return int(calc_crc32c(content))
    checksum, part_bytes = 0, tuning.checksum_part_bytes
    for start in range(0, len(content), part_bytes):
        # It accepts only `bytes`.
        checksum = google_crc32c.extend(checksum, content[start : start + part_bytes].tobytes())
    return checksum
