"""Any bytes survive each coding, and no damaged ones are taken for others."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Code, Rejected
from headrace.protocol.compression import CODINGS, compress, decompress

LIMIT_BYTES = 65_536
codings = st.sampled_from(CODINGS)
contents = st.one_of(
    st.binary(max_size=4096),
    st.tuples(st.binary(max_size=16), st.integers(0, 4096)).map(lambda each: each[0] * each[1]),
)


@given(contents, codings)
def test_content_survives_coding(content: bytes, coding: str) -> None:
    """Content within the limit comes back, other content is too large."""
    compressed = compress(content, coding)
    if len(content) <= LIMIT_BYTES:
        assert decompress(compressed, coding, LIMIT_BYTES, "value") == content
        return
    with pytest.raises(Rejected) as raised:
        decompress(compressed, coding, LIMIT_BYTES, "value")
    assert raised.value.code == Code.TOO_LARGE


@given(st.binary(min_size=1, max_size=4096), codings, st.data())
def test_truncated_content_is_refused(content: bytes, coding: str, data: st.DataObject) -> None:
    """Wherever it ends."""
    compressed = compress(content, coding)
    end = data.draw(st.integers(1, len(compressed) - 1))
    with pytest.raises(Rejected) as raised:
        decompress(compressed[:end], coding, LIMIT_BYTES, "value")
    assert raised.value.code == Code.INVALID_REQUEST


@given(st.binary(max_size=4096), codings)
def test_any_bytes_are_decompressed_or_refused(content: bytes, coding: str) -> None:
    """No other error ends a process."""
    with suppress(Rejected):
        assert len(decompress(content, coding, LIMIT_BYTES, "value")) <= LIMIT_BYTES
