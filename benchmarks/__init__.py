"""Measurements: load on a real local broker, loops by hand and other frameworks, recorded results.

`make bench` runs `python -m benchmarks`, which writes `benchmarks/results/latest.json` and the
tables and plots of `docs/performance.md`.
"""
