"""Measurements: load on a real local broker, loops by hand and other frameworks, recorded results.

`make bench` runs `python -m benchmarks`, which writes `benchmarks/results/latest.json` and the
tables and plots of `docs/performance.md`.
"""

from __future__ import annotations

import os

# For the loops by hand too, and the other servers: ONNX Runtime would report to its makers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
