"""The page at `/`: `page.html`, which polls `/status` every second and shows the result.

Its content security policy lets the browser run this file's own script and style and request this
server, and nothing else: markup in a producer's error message cannot load, run or send anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Page(NamedTuple):
    """The file's bytes, and the headers that it is sent with."""

    body: bytes
    headers: dict[str, str]


@cache
def load_page() -> Page:
    """Read the page and compute the hashes that allow its script and style; blocks the first
    time.
    """
    text = (files("headrace.telemetry") / "page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of(text, 'script')}",
            f"style-src {_hash_of(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(
        text.encode(),
        {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _hash_of(text: str, element: str) -> str:
    """Return the hash source of the only such element:
    https://www.w3.org/TR/CSP3/#grammardef-hash-source.
    """
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, flags=re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
