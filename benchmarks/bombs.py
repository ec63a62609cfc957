"""Small payloads that would become large: time and memory until each is refused as `TOO_LARGE`.

    python -m benchmarks.bombs [--times N] [--out FILE]

Each payload is refused `--times` times in a process of its own, on one thread, with the default
limits, by what converts it in ingest. The time is that of the thread's processor, the memory the
growth of the process's largest resident set (VmHWM) over that after one payload of the same kind
that is accepted.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import brotli
import numpy as np
import soundfile
import tokenizers
from PIL import Image

from benchmarks.machine import describe_machine
from benchmarks.results import RESULTS, record
from headrace.config import make_settings
from headrace.errors import Code, Rejected
from headrace.models.inputs.images import Images
from headrace.models.inputs.sounds import Sounds
from headrace.models.inputs.tokens import Tokens
from headrace.models.media_config import ImageTransform, SoundTransform, TokensTransform
from headrace.models.signature import TensorSpec, make_signature
from headrace.protocol.compression import (
    BROTLI,
    CODINGS,
    GZIP,
    ZSTD,
    compress,
    decompress,
)

LARGE_BYTES = 256 << 20
SCORES = [TensorSpec("scores", "FP32", (-1, 10))]


class Bomb(NamedTuple):
    """A payload that must be refused.

    Attributes:
        convert: what ingest does with it.
        good: a payload of its kind that is accepted.
    """

    convert: Callable[[bytes], object]
    good: bytes
    payload: bytes


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def _png() -> bytes:
    """Return a PNG that has 60,000 x 60,000 pixels, all zeros."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0))
    rows = zlib.compressobj(9)
    row = bytes(1 + 60_000 // 8)
    content = b"".join([*(rows.compress(row) for _ in range(60_000)), rows.flush()])
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", content) + _chunk(b"IEND", b"")


def _tiff() -> bytes:
    """Return a TIFF of 100,000 pages of 8 x 8 pixels, which share a strip."""
    fields = ((256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (273, 8), (279, 64))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields)
    begins, length = 8 + 64, 2 + len(entries) + 4
    made = [struct.pack("<2sHI64x", b"II", 42, begins)]
    for page in range(1, 100_001):
        following = begins + length * page if page < 100_000 else 0
        made.append(struct.pack("<H", len(fields)) + entries + struct.pack("<I", following))
    return b"".join(made)


def _image(make: Callable[[], bytes]) -> Bomb:
    spec = TensorSpec("images", "UINT8", (-1, 8, 8, 3))
    images = Images(ImageTransform(), make_signature([spec], SCORES))
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return Bomb(lambda payload: images(payload, ""), file.getvalue(), make())


def _sound() -> Bomb:
    spec = TensorSpec("samples", "FP32", (-1, -1))
    sounds = Sounds(SoundTransform(), make_signature([spec], SCORES))
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4000, np.float32), 16_000, format="FLAC")
    flac = bytearray(file.getvalue())
    flac[18:26] = struct.pack(">Q", struct.unpack(">Q", flac[18:26])[0] >> 36 << 36 | 10**10)
    return Bomb(lambda payload: sounds(payload, ""), file.getvalue(), bytes(flac))


def _compress_large(coding: str) -> bytes:
    """Return as few bytes as a coding makes of zeros."""
    if coding in (ZSTD, BROTLI):
        return compress(bytes(LARGE_BYTES), coding)
    stream = zlib.compressobj(9, zlib.DEFLATED, 31 if coding == GZIP else 15)
    return stream.compress(bytes(LARGE_BYTES)) + stream.flush()


def _compress_in_small_blocks(window_bits: int) -> bytes:
    """Return a br stream whose first block does not show how large it becomes."""
    return bytes(brotli.compress(bytes(LARGE_BYTES), quality=0, lgwin=window_bits))


def _compressed(coding: str, make: Callable[[], bytes]) -> Bomb:
    limit_bytes = make_settings({}).limits.max_request_bytes
    return Bomb(
        lambda payload: decompress(payload, coding, limit_bytes, "value"),
        compress(b"{}", coding),
        make(),
    )


def _tokens(payload: bytes) -> Bomb:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=100, special_tokens=special)
    tokenizer.train_from_iterator(["a few words to learn from"], trainer)
    signature = make_signature([TensorSpec("input_ids", "INT64", (-1, -1))], SCORES)
    with TemporaryDirectory() as directory:
        tokenizer.save(f"{directory}/tokenizer.json")
        tokens = Tokens(TokensTransform(), signature, Path(directory))
    return Bomb(lambda given: tokens(given, "text/plain"), b"a few words", payload)


BOMBS: dict[str, Callable[[], Bomb]] = {
    **{
        f"{coding}, 256 MiB of zeros": partial(
            _compressed, coding, partial(_compress_large, coding)
        )
        for coding in sorted(CODINGS)
    },
    **{
        f"br, small blocks, window 2^{bits}": partial(
            _compressed, BROTLI, partial(_compress_in_small_blocks, bits)
        )
        for bits in (16, 22, 24)
    },
    "PNG, 60,000 x 60,000": partial(_image, _png),
    "TIFF, 100,000 pages": partial(_image, _tiff),
    "FLAC, 10^10 samples": _sound,
    "text, 4 MB": partial(_tokens, b"a " * 2_000_000),
    "text, 4,000 tokens": partial(_tokens, b"a " * 4_000),
}


def _peak_bytes() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _forget_peak() -> None:
    """Begin the largest resident set anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _refuse(bomb: Bomb) -> str:
    """Return the code with which a payload is refused; empty if it is not."""
    try:
        bomb.convert(bomb.payload)
    except Rejected as error:
        return error.code
    return ""


def measure(name: str, times: int) -> dict[str, Any]:
    """Return the times in which a payload was refused, and the memory that they took."""
    bomb = BOMBS[name]()
    bomb.convert(bomb.good)
    _forget_peak()
    before_bytes = _peak_bytes()
    took_ms = []
    for _ in range(times):
        began_s = time.thread_time()
        code = _refuse(bomb)
        took_ms.append((time.thread_time() - began_s) * 1000)
        if code != Code.TOO_LARGE:
            raise AssertionError(f"{name}: expected TOO_LARGE, got {code or 'no error'}")
    return {
        "name": name,
        "payload_bytes": len(bomb.payload),
        "median_ms": median(took_ms),
        "max_ms": max(took_ms),
        "grown_bytes": _peak_bytes() - before_bytes,
    }


def main() -> None:
    """Measure each payload in a process of its own, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "bombs.json")
    parser.add_argument("--only", help="measure this one here, and print it")
    given = parser.parse_args()
    if given.only is not None:
        print(json.dumps(measure(given.only, given.times)))
        return
    found = []
    for name in BOMBS:
        command = [sys.executable, "-m", "benchmarks.bombs", "--times", str(given.times)]
        printed = subprocess.run(
            [*command, "--only", name], check=True, stdout=subprocess.PIPE
        ).stdout
        each = json.loads(printed)
        found.append(each)
        print(
            f"{name:28} {each['payload_bytes']:>9} bytes  median {each['median_ms']:6.2f} ms  "
            f"max {each['max_ms']:6.2f} ms  memory + {each['grown_bytes'] / 1e6:.1f} MB"
        )
    record(given.out, {"machine": describe_machine(), "times": given.times, "bombs": found})


if __name__ == "__main__":
    main()
