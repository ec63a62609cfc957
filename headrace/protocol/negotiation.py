"""Choice by quality, as in the headers `accept` and `accept-encoding` (RFC 9110, 12.4.2, 12.5)."""

from __future__ import annotations

from functools import lru_cache

from headrace.errors import Code, Rejected
from headrace.tuning import TUNING

ANY_TYPE = "*/*"
"""Range of all content types."""


def read_qualities(text: str) -> dict[str, float]:
    """Return the quality, from 0 to 1, of each item in a list such as `gzip;q=0.5, *;q=0`.

    Names are in lower case, without other parameters. A quality that cannot be read is 0.
    """
    qualities: dict[str, float] = {}
    for item in text.lower().split(","):
        name, *parameters = item.split(";")
        if name.strip():
            qualities[name.strip()] = _read_quality(parameters)
    return qualities


def _read_quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                return 0.0
            return min(quality, 1.0) if quality > 0 else 0.0  # 0 for NaN
    return 1.0


def media_type(content_type: str) -> str:
    """Return a content type in lower case, without parameters."""
    return content_type.partition(";")[0].strip().lower()


def read_accept(text: str) -> str:
    """Return a header `accept` in lower case; empty if it accepts all content types equally."""
    qualities = read_qualities(text)
    return "" if qualities.keys() <= {ANY_TYPE} and all(qualities.values()) else text.lower()


@lru_cache(maxsize=TUNING.protocol.cached_header_values)
def choose_content_type(accept: str, offers: tuple[str, ...]) -> str:
    """Return the offer to which `accept` gives the highest quality; empty if it accepts none.

    Args:
        accept: see `read_accept`; empty accepts all.
        offers: content types in lower case, without parameters; of equal qualities the first one
            is taken.
    """
    if not accept:
        return offers[0]
    qualities = read_qualities(accept)

    def find_quality(offer: str) -> float:
        # The most specific range counts, so that `image/*, image/png;q=0` accepts no PNG.
        for accepted in (offer, f"{offer.partition('/')[0]}/*", ANY_TYPE):
            if accepted in qualities:
                return qualities[accepted]
        return 0.0

    best = max(offers, key=find_quality)
    return best if find_quality(best) else ""


def require_content_type(accept: str, offers: tuple[str, ...]) -> str:
    """Do the same, and refuse what accepts none of the offers.

    Raises:
        Rejected: `INVALID_REQUEST`, with the offers.
    """
    chosen = choose_content_type(accept, offers)
    if not chosen:
        shown = accept[:80] + ("..." if len(accept) > 80 else "")
        raise Rejected.mismatch(
            Code.INVALID_REQUEST,
            "header accept",
            expected=f"at least one of {', '.join(dict.fromkeys(offers))}",
            got=shown,
        )
    return chosen
