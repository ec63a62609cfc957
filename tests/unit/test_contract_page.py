"""The page on the contract against the code that keeps it."""

from __future__ import annotations

import re

import pytest

from headrace.errors import Code
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.headers import (
    DECODED_TYPES,
    OWN_HEADERS,
    dead_letter_headers,
    parse_envelope,
)
from headrace.protocol.messages import Failure, Request
from headrace.protocol.tensors import DATATYPES
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """The cells of the tables below a heading, without their head lines."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| ?(`.+?) ?\|$", section, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_contract_page_lists_codes_with_consequences() -> None:
    """Each code has a row that says whether it is retriable and whether a dead letter is kept."""
    told = {cells[0].strip("`"): tuple(cells[2:]) for cells in rows("Codes")}

    assert told == {
        code: ("yes" if code.is_retriable else "no", "yes" if code.is_dead_letter else "no")
        for code in Code
    }


@pytest.mark.parametrize("name", sorted(OWN_HEADERS | {"kafka_replyTopic", "kafka_replyPartition"}))
def test_contract_page_lists_every_header(name: str) -> None:
    """The page names each header that Headrace reads or writes."""
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("content_type", sorted(DECODED_TYPES - {""}))
def test_contract_page_lists_every_content_type(content_type: str) -> None:
    """The page names each content type whose values are decoded."""
    assert f"`{content_type}`" in PAGE


def test_contract_page_lists_dead_letter_headers_in_order() -> None:
    """The table has the headers of a dead letter, all of them and no others."""
    request = Request(NULL_ACK, 0, 0, -1, 0, None, None, [], parse_envelope([], 0, 0))
    headers = dead_letter_headers(request, Failure(Code.MODEL_FAILED, "", "executor"), "requests")

    assert [cells[0].strip("`") for cells in rows("Dead letters")] == [name for name, _ in headers]


def test_contract_page_lists_datatypes() -> None:
    """Written out, the row of datatypes has those of `headrace.protocol.tensors`."""
    row = next(cells for cells in rows("Request values") if cells[0] == "`datatype`")
    told = re.sub(r"`(U?INT)8` to `U?INT64`", r"`\g<1>8`, `\g<1>16`, `\g<1>32`, `\g<1>64`", row[2])

    assert set(re.findall(r"`(\w+)`", told)) == set(DATATYPES)
