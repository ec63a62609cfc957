"""What the status page's script draws, by Node.js and a document that has only what it uses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from headrace.telemetry.http import load_page

DEADLINE_S = 60.0

_DOCUMENT = """
class Node {
  constructor(text = "") { this.text = text; this.children = []; this.classList = { toggle() {} }; }
  append(...added) {
    this.children.push(...added.map((each) => (each instanceof Node ? each : new Node(each))));
  }
  replaceChildren(...added) { this.children = []; this.append(...added); }
  setAttribute() {}
  get textContent() { return this.text + this.children.map((each) => each.textContent).join(""); }
  set textContent(text) { this.children = []; this.text = text; }
}
const places = {};
const document = {
  body: new Node(),
  createElement: () => new Node(),
  createElementNS: () => new Node(),
  getElementById: (id) => (places[id] ??= new Node()),
};
const fetch = async () => ({ ok: true, json: async () => STATUS });
// The script asks again after each look, when all is drawn.
const setTimeout = () => {
  const [head, body] = places[TABLE].children[0].children;
  const rows = body.children.map((row) => row.children.map((each) => each.textContent));
  console.log(JSON.stringify({ rows, lost: places.lost.textContent }));
};
"""


def drawn_rows(status: dict[str, Any], table: str) -> list[list[str]]:
    """Return the texts in the rows of a table of the page; without Node.js the test is skipped.

    Args:
        status: what `/status` answers.
        table: id of the element that has the table.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("not installed: node")
    (script,) = re.findall(r"<script>(.*)</script>", load_page().body.decode(), flags=re.DOTALL)
    given = f"const STATUS = {json.dumps(status)}, TABLE = {json.dumps(table)};"
    ended = subprocess.run(
        [node, "-"],
        input=f"{{{given}{_DOCUMENT}{script}}}",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    drawn = json.loads(ended.stdout)
    assert drawn["lost"] == ""
    rows: list[list[str]] = drawn["rows"]
    return rows
