"""The page at `/`, as a file and as it is sent; `tests/flow/test_status_page.py` runs it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from headrace.models.registry import Models
from headrace.telemetry.health import Health
from headrace.telemetry.http import HttpServer, load_page
from tests.support.models import settings_for

HOST = "127.0.0.1"
SVG = "http://www.w3.org/2000/svg"  # a namespace; nothing is fetched from there
MARKUP_FROM_TEXT = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")


@pytest.fixture
def text() -> str:
    """The page."""
    return load_page().body.decode()


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[ClientSession]:
    """A client of a server without models."""
    async with (
        HttpServer(
            (HOST, 0), Health(), Models(settings_for(tmp_path)).catalog, CollectorRegistry()
        ) as to,
        ClientSession(f"http://{HOST}:{to.port}") as client,
    ):
        yield client


class Elements(HTMLParser):
    """All elements of a page with their attributes, and the ids in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


async def test_status_page_is_served_at_root(session: ClientSession) -> None:
    """A browser gets HTML that it neither guesses at nor keeps."""
    async with session.get("/") as answer:
        assert (answer.status, answer.content_type) == (200, "text/html")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-cache"
        assert (await answer.read()) == load_page().body


@pytest.mark.parametrize("element", ["script", "style"])
async def test_status_page_policy_allows_only_its_own_script_and_style(
    session: ClientSession, text: str, element: str
) -> None:
    """The policy names their hashes, and allows nothing by default."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    async with session.get("/") as answer:
        policy = answer.headers["Content-Security-Policy"]

    assert f"{element}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_status_page_loads_no_external_resource(text: str) -> None:
    """No address of another host, no second file, no font, no frame."""
    outside = [
        url for url in re.findall(r"\bhttps?://[^\s\"'<]+|url\(|@import", text) if url != SVG
    ]
    loading = [
        (tag, value)
        for tag, attributes in Elements(text).found
        for name, value in attributes.items()
        if name in ("src", "srcset", "href", "action", "data")
    ]

    assert outside == []
    assert loading == [("link", "data:,"), ("a", "status")]


def test_status_page_inserts_no_markup(text: str) -> None:
    """Messages of callers become text nodes: nothing that parses a string is used."""
    assert [name for name in MARKUP_FROM_TEXT if name in text] == []


def test_status_page_has_elements_that_its_script_fills(text: str) -> None:
    """Every id that the script asks for is an element's."""
    ids = {attributes.get("id") for _, attributes in Elements(text).found}
    asked = set(re.findall(r'(?:byId|table)\(\s*"(\w+)"', text))

    assert asked
    assert asked <= ids


def test_status_page_is_accessible(text: str) -> None:
    """It has a language, a title, headings in order, and a name for each region that scrolls."""
    elements = Elements(text).found
    levels = [int(tag[1]) for tag, _ in elements if re.fullmatch(r"h[1-6]", tag)]
    scrolling = [each for _, each in elements if each.get("class") == "scroll"]

    assert ("html", {"lang": "en"}) in elements
    assert levels[0] == 1
    assert set(levels[1:]) == {2}
    assert all(each["aria-label"] and each["tabindex"] == "0" for each in scrolling)
