"""Write `deploy/grafana/headrace.json`.

python -m tools.dashboard            write it
python -m tools.dashboard --check    fail if it differs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.dashboard.grafana import dashboard
from tools.dashboard.operation_rows import ENDS, PARTITIONS, PROCESSES, READING
from tools.dashboard.traffic_rows import BATCHES, GATEWAYS, GLANCE, REQUESTS

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "headrace.json"
ROWS = (GLANCE, REQUESTS, GATEWAYS, BATCHES, READING, PARTITIONS, ENDS, PROCESSES)


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(ROWS), indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the file, or with `--check` say whether it would change. Returns the exit code."""
    if "--check" not in arguments:
        FILE.write_text(text(), encoding="utf-8")
        return 0
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text():
        return 0
    print(f"{FILE.name} is not what the code makes of it; run: python -m tools.dashboard")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
