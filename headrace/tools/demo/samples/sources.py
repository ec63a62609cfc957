"""Sample files of source code. Python comes from the standard library; the rest is written here."""

from __future__ import annotations

import difflib
import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from headrace.tools.demo.samples.words import Words

MIN_SOURCE_BYTES = 1_500
MAX_SOURCE_BYTES = 200_000


@cache
def python_files() -> tuple[Path, ...]:
    """Return the modules of the standard library that are long enough to be classified."""
    library = Path(sysconfig.get_path("stdlib"))
    return tuple(
        path
        for path in sorted(library.glob("*.py"))
        if MIN_SOURCE_BYTES <= path.stat().st_size <= MAX_SOURCE_BYTES
    )


def _python(words: Words) -> bytes:
    return words.random.choice(python_files()).read_bytes()


def _diff(words: Words) -> bytes:
    path = words.random.choice(python_files())
    before = path.read_text(encoding="utf-8").splitlines(keepends=True)[:200]
    after = list(before)
    for _ in range(words.number(3, 8)):
        line = words.number(0, len(after) - 1)
        after[line : line + words.number(0, 2)] = [f"# {words.sentence()}\n"]
    names = f"a/{path.name}", f"b/{path.name}"
    head = f"diff --git {names[0]} {names[1]}\nindex 83db48f..bf269f4 100644\n"
    return (head + "".join(difflib.unified_diff(before, after, *names))).encode()


def _javascript(words: Words) -> bytes:
    functions = "".join(
        f"/** {words.sentence()} */\n"
        f"export async function {words.verb()}{words.noun().title()}({noun}, options = {{}}) {{\n"
        f"  const {other} = await fetch(`/api/{other}/${{{noun}.id}}`);\n"
        f"  if (!{other}.ok) {{\n    throw new Error('{words.sentence()}');\n  }}\n"
        f"  const items = (await {other}.json()).filter((item) => item.size > {words.number()});\n"
        f"  return items.map(({{ id, name }}) => ({{ id, name, {words.verb()}: true }}));\n}}\n\n"
        for noun, other in (words.nouns(2) for _ in range(words.number(3, 7)))
    )
    return (
        f"'use strict';\n\nimport {{ {words.verb()} }} from './{words.noun()}.js';\n\n"
        f"const LIMIT = {words.number()};\n\n{functions}"
    ).encode()


def _c(words: Words) -> bytes:
    functions = "".join(
        f"/* {words.sentence()} */\n"
        f"static int {words.verb()}_{noun}(struct {noun} *{noun}, size_t length)\n{{\n"
        f"    if ({noun} == NULL || length > {words.number()}) {{\n"
        f'        fprintf(stderr, "{noun}: %zu\\n", length);\n        return -1;\n    }}\n'
        f"    for (size_t i = 0; i < length; i++) {{\n"
        f"        {noun}->{words.noun()}[i] = (uint8_t)(i * {words.number(2, 99)});\n    }}\n"
        f"    memset({noun}->{words.noun()}, 0, sizeof({noun}->{words.noun()}));\n"
        f"    return 0;\n}}\n\n"
        for noun in words.nouns(words.number(3, 7))
    )
    return (
        "#include <stdint.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n\n"
        f"#define MAX_{words.noun().upper()} {words.number()}\n\n{functions}"
        "int main(int argc, char **argv)\n{\n    (void)argc;\n    (void)argv;\n    return 0;\n}\n"
    ).encode()


def _java(words: Words) -> bytes:
    name = words.noun().title()
    methods = "".join(
        f"    /** {words.sentence()} */\n"
        f"    public List<String> {words.verb()}{noun.title()}(int {noun}) {{\n"
        f"        if ({noun} > {words.number()}) {{\n"
        f'            throw new IllegalArgumentException("{words.title()}");\n        }}\n'
        f"        List<String> result = new ArrayList<>();\n"
        f'        result.add(String.format("%d", {noun} * {words.number()}));\n'
        f"        return result;\n    }}\n\n"
        for noun in words.nouns(words.number(3, 7))
    )
    return (
        f"package org.example.{words.noun()};\n\nimport java.util.ArrayList;\n"
        f"import java.util.List;\n\npublic final class {name} {{\n"
        f"    private final int {words.noun()} = {words.number()};\n\n{methods}}}\n"
    ).encode()


def _go(words: Words) -> bytes:
    functions = "".join(
        f"// {words.verb().title()}{noun.title()}: {words.sentence()}\n"
        f"func {words.verb().title()}{noun.title()}({noun} []byte, limit int) (int, error) {{\n"
        f"\tif len({noun}) > limit {{\n"
        f'\t\treturn 0, fmt.Errorf("{noun}: %d bytes", len({noun}))\n\t}}\n'
        f"\ttotal := 0\n\tfor _, value := range {noun} {{\n\t\ttotal += int(value)\n\t}}\n"
        f"\treturn total, nil\n}}\n\n"
        for noun in words.nouns(words.number(3, 7))
    )
    return (f'package {words.noun()}\n\nimport (\n\t"fmt"\n\t"os"\n)\n\n{functions}').encode()


def _rust(words: Words) -> bytes:
    functions = "".join(
        f"/// {words.sentence()}\n"
        f"pub fn {words.verb()}_{noun}({noun}: &[u8]) -> Result<Vec<u64>, Error> {{\n"
        f"    let mut total: u64 = {words.number()};\n"
        f"    for value in {noun}.iter().filter(|v| **v > {words.number(0, 200)}) {{\n"
        f"        total = total.wrapping_add(u64::from(*value));\n    }}\n"
        f"    match total {{\n        0 => Err(Error::Empty),\n        _ => Ok(vec![total]),\n"
        f"    }}\n}}\n\n"
        for noun in words.nouns(words.number(3, 7))
    )
    return (
        "use std::collections::HashMap;\nuse std::fmt;\n\n#[derive(Debug, Clone)]\n"
        f"pub enum Error {{\n    Empty,\n    {words.noun().title()}(String),\n}}\n\n{functions}"
    ).encode()


def _shell(words: Words) -> bytes:
    steps = "".join(
        f"# {words.sentence()}\n{words.verb()}_{noun}() {{\n"
        f'  local {noun}="$1"\n  if [[ ! -d "/var/lib/${{{noun}}}" ]]; then\n'
        f'    echo "missing {noun}: ${{{noun}}}" >&2\n    return 1\n  fi\n'
        f'  find "/var/lib/${{{noun}}}" -name "*.log" -mtime +{words.number(1, 60)} '
        f"| xargs -r gzip\n}}\n\n"
        for noun in words.nouns(words.number(3, 7))
    )
    return f'#!/usr/bin/env bash\nset -euo pipefail\n\n{steps}main "$@"\n'.encode()


def _sql(words: Words) -> bytes:
    tables = "".join(_sql_table(words, table) for table in words.nouns(words.number(2, 6)))
    return f"-- {words.sentence()}\nBEGIN TRANSACTION;\n\n{tables}COMMIT;\n".encode()


def _sql_table(words: Words, table: str) -> str:
    rows = ",\n".join(
        f"    ({words.number()}, '{words.title()}', '{words.date()}')"
        for _ in range(words.number(2, 6))
    )
    return (
        f"CREATE TABLE IF NOT EXISTS {table} (\n    id INTEGER PRIMARY KEY,\n"
        f"    {words.noun()}_name VARCHAR({words.number(16, 255)}) NOT NULL,\n"
        f"    created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP\n);\n\n"
        f"INSERT INTO {table} VALUES\n{rows};\n\n"
        f"SELECT id, COUNT(*) AS total FROM {table}\nWHERE created_at > '{words.date()}'\n"
        f"GROUP BY id HAVING COUNT(*) > {words.number()}\nORDER BY total DESC;\n\n"
    )  # a sample file, never run


def _css(words: Words) -> bytes:
    return "".join(
        f".{noun}-{words.noun()}, #{words.noun()} > a:hover {{\n"
        f"  display: flex;\n  margin: {words.number(0, 40)}px auto;\n"
        f"  color: #{words.number(0, 0xFFFFFF):06x};\n"
        f"  background-color: rgba({words.number(0, 255)}, {words.number(0, 255)}, 0, 0.5);\n"
        f"  font-family: 'Helvetica', sans-serif;\n}}\n\n"
        for noun in words.nouns(words.number(8, 20))
    ).encode()


def _dockerfile(words: Words) -> bytes:
    steps = "".join(
        f"RUN {words.verb()}-{noun} --{words.noun()}={words.number()} && \\\n"
        f"    rm -rf /tmp/{noun}\nCOPY {noun}/ /srv/{noun}/\n"
        for noun in words.nouns(words.number(3, 8))
    )
    return (
        f"FROM debian:bookworm-slim AS {words.noun()}\nARG VERSION=1.{words.number(0, 40)}\n"
        f"ENV {words.noun().upper()}={words.number()}\nWORKDIR /srv\n{steps}"
        f'USER nobody\nEXPOSE {words.number(1024, 9999)}\nENTRYPOINT ["/srv/{words.noun()}"]\n'
    ).encode()


def _makefile(words: Words) -> bytes:
    targets = words.nouns(words.number(4, 9))
    rules = "".join(
        f"{target}: $(SOURCES) {words.noun()}.o\n\t$(CC) $(CFLAGS) -o $@ $^\n"
        f"\t@echo '{words.title()}'\n\n"
        for target in targets
    )
    return (
        f"CC ?= gcc\nCFLAGS := -O{words.number(0, 3)} -Wall\nSOURCES := $(wildcard src/*.c)\n\n"
        f".PHONY: all clean\n\nall: {' '.join(targets)}\n\n{rules}"
        f"clean:\n\trm -f *.o {' '.join(targets)}\n"
    ).encode()


MAKERS: Mapping[str, Callable[[Words], bytes]] = MappingProxyType(
    {
        "c": _c,
        "css": _css,
        "diff": _diff,
        "dockerfile": _dockerfile,
        "go": _go,
        "java": _java,
        "javascript": _javascript,
        "makefile": _makefile,
        "python": _python,
        "rust": _rust,
        "shell": _shell,
        "sql": _sql,
    }
)
"""Makers by magika's name for the kind."""
