"""Sample files that people and programs read as text: tables, markup, settings, messages."""

from __future__ import annotations

import csv
import io
import json
import plistlib
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from email.message import EmailMessage
from html import escape
from types import MappingProxyType

from headrace.tools.demo.samples.words import Words


def _record(words: Words) -> dict[str, str | int | float | bool]:
    return {
        "id": words.number(1000, 99999),
        "name": words.person(),
        "title": words.title(),
        "created": words.date(),
        "amount": words.amount(),
        "active": words.number() % 2 == 0,
    }


def _records(words: Words) -> list[dict[str, str | int | float | bool]]:
    return [_record(words) for _ in range(words.number(8, 30))]


def _csv(words: Words) -> bytes:
    rows = _records(words)
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue().encode()


def _json(words: Words) -> bytes:
    body = {"kind": words.noun(), "updated": words.date(), "items": _records(words)}
    return json.dumps(body, indent=2).encode()


def _jsonl(words: Words) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in _records(words)).encode()


def _xml(words: Words) -> bytes:
    root, item = words.nouns(2)
    rows = "".join(
        f'  <{item} id="{row["id"]}" active="{str(row["active"]).lower()}">\n'
        f"    <name>{row['name']}</name>\n    <title>{row['title']}</title>\n"
        f"    <created>{row['created']}</created>\n  </{item}>\n"
        for row in _records(words)
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}>\n{rows}</{root}>\n'.encode()


def _html(words: Words) -> bytes:
    title = words.title()
    sections = "".join(
        f'<section id="{words.noun()}">\n<h2>{words.title()}</h2>\n<p>{escape(words.paragraph())}'
        f'</p>\n<a href="/{words.noun()}/{words.number()}">{words.verb()}</a>\n</section>\n'
        for _ in range(words.number(3, 8))
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{title}</title>\n</head>\n<body>\n<h1>{title}</h1>\n{sections}</body>\n</html>\n"
    ).encode()


def _svg(words: Words) -> bytes:
    shapes = "".join(
        f'  <rect x="{words.number(0, 300)}" y="{words.number(0, 200)}" '
        f'width="{words.number(5, 80)}" height="{words.number(5, 80)}" '
        f'fill="#{words.number(0, 0xFFFFFF):06x}"/>\n'
        f'  <circle cx="{words.number(0, 300)}" cy="{words.number(0, 200)}" '
        f'r="{words.number(2, 40)}" stroke="black" fill="none"/>\n'
        for _ in range(words.number(6, 20))
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="320" height="240" '
        f'viewBox="0 0 320 240">\n  <title>{words.title()}</title>\n{shapes}</svg>\n'
    ).encode()


def _markdown(words: Words) -> bytes:
    sections = "".join(
        f"## {words.title()}\n\n{words.paragraph()}\n\n"
        f"- **{words.noun()}**: {words.sentence()}\n- [{words.noun()}](./{words.noun()}.md)\n"
        f"- `{words.verb()}_{words.noun()}()`\n\n"
        f"```sh\n{words.verb()} --{words.noun()} {words.number()}\n```\n\n"
        for _ in range(words.number(3, 7))
    )
    return f"# {words.title()}\n\n{words.paragraph()}\n\n{sections}".encode()


def _rst(words: Words) -> bytes:
    def heading(text: str, line: str) -> str:
        return f"{text}\n{line * len(text)}\n\n"

    sections = "".join(
        f"{heading(words.title(), '-')}{words.paragraph()}\n\n.. note::\n\n   {words.sentence()}"
        f"\n\n.. code-block:: python\n\n   {words.noun()}.{words.verb()}({words.number()})\n\n"
        f"See :ref:`{words.noun()}` and ``{words.verb()}``.\n\n"
        for _ in range(words.number(3, 7))
    )
    return f"{heading(words.title(), '=')}{words.paragraph()}\n\n{sections}".encode()


def _latex(words: Words) -> bytes:
    sections = "".join(
        f"\\section{{{words.title()}}}\n\\label{{sec:{words.noun()}}}\n{words.paragraph()}\n"
        f"\\begin{{equation}}\n  x_{{{words.number(1, 9)}}} = \\frac{{{words.number()}}}"
        f"{{\\alpha + {words.number()}}}\n\\end{{equation}}\n\n"
        for _ in range(words.number(3, 7))
    )
    return (
        "\\documentclass[11pt]{article}\n\\usepackage{amsmath}\n"
        f"\\title{{{words.title()}}}\n\\author{{{words.person()}}}\n"
        f"\\begin{{document}}\n\\maketitle\n\n{sections}\\end{{document}}\n"
    ).encode()


def _ini(words: Words) -> bytes:
    parser = ConfigParser()
    for section in words.nouns(words.number(4, 8)):
        parser[section] = {
            f"{words.adjective()}_{name}": str(words.number()) for name in words.nouns(4)
        }
        parser[section]["enabled"] = "true"
        parser[section]["path"] = f"/var/lib/{section}/{words.noun()}"
    text = io.StringIO()
    parser.write(text)
    return text.getvalue().encode()


def _toml(words: Words) -> bytes:
    tables = "".join(
        f'[{table}.{words.noun()}]\nname = "{words.title()}"\nports = [{words.number()}, '
        f"{words.number()}]\nsince = {words.date()}\nratio = {words.amount()}\nenabled = true\n\n"
        for table in words.nouns(words.number(4, 9))
    )
    dependencies = "".join(f'    "{noun}>={words.number(0, 9)}.1",\n' for noun in words.nouns(4))
    return (
        f'[project]\nname = "{words.noun()}"\nversion = "1.{words.number(0, 30)}.0"\n'
        f"dependencies = [\n{dependencies}]\n\n{tables}"
    ).encode()


def _yaml(words: Words) -> bytes:
    parts = "".join(
        f"  - name: {name}\n    image: {words.noun()}:{words.number(1, 9)}.{words.number(0, 9)}\n"
        f"    replicas: {words.number(1, 9)}\n    env:\n      {words.noun().upper()}: "
        f'"{words.number()}"\n    ports:\n      - {words.number(1024, 9999)}\n'
        for name in words.nouns(words.number(4, 9))
    )
    return (
        f"# {words.sentence()}\nversion: 2\nmetadata:\n  name: {words.noun()}\n  labels:\n"
        f"    owner: {words.noun()}\n    stage: {words.adjective()}\nservices:\n{parts}"
    ).encode()


def _plist(words: Words) -> bytes:
    return plistlib.dumps({noun: _record(words) for noun in words.nouns(words.number(3, 8))})


def _eml(words: Words) -> bytes:
    message = EmailMessage()
    message["From"] = f"{words.noun()}@example.org"
    message["To"] = f"{words.noun()}@example.com"
    message["Date"] = f"Mon, {words.number(1, 28)} Jan 2024 10:{words.number(10, 59)}:00 +0100"
    message["Subject"] = words.title()
    message["Message-ID"] = f"<{words.number(10**9, 10**10)}@mail.example.org>"
    message.set_content("\n\n".join(words.paragraph(2) for _ in range(words.number(2, 6))))
    return message.as_bytes()


def _calendar(words: Words) -> bytes:
    events = "".join(
        f"BEGIN:VEVENT\r\nUID:{words.number(10**6, 10**7)}@example.org\r\n"
        f"DTSTAMP:{words.date().replace('-', '')}T100000Z\r\n"
        f"DTSTART:{words.date().replace('-', '')}T{words.number(10, 20)}0000Z\r\n"
        f"SUMMARY:{words.title()}\r\nLOCATION:{words.noun()}\r\nEND:VEVENT\r\n"
        for _ in range(words.number(3, 12))
    )
    return (
        "BEGIN:VCALENDAR\r\nVERSION:2.0\r\nPRODID:-//example.org//calendar//EN\r\n"
        f"{events}END:VCALENDAR\r\n"
    ).encode()


def _subtitles(words: Words) -> bytes:
    return "".join(
        f"{line}\n00:{line:02}:01,{words.number(100, 999)} --> 00:{line:02}:0{words.number(3, 9)},"
        f"{words.number(100, 999)}\n{words.sentence()}\n\n"
        for line in range(1, words.number(10, 40))
    ).encode()


MAKERS: Mapping[str, Callable[[Words], bytes]] = MappingProxyType(
    {
        "appleplist": _plist,
        "csv": _csv,
        "eml": _eml,
        "html": _html,
        "ics": _calendar,
        "ini": _ini,
        "json": _json,
        "jsonl": _jsonl,
        "latex": _latex,
        "markdown": _markdown,
        "rst": _rst,
        "srt": _subtitles,
        "svg": _svg,
        "toml": _toml,
        "xml": _xml,
        "yaml": _yaml,
    }
)
"""Makers by magika's name for the kind."""
