"""Comparison of a candidate with the current model on the same recorded requests.

The current model answers every request twice, and the candidate once. The difference between the
current model's own answers is the noise floor; the candidate is judged against it.

- `differences`: the difference of two answers to one request; pure
- `tally`: totals over all requests, and latencies; pure
- `verdict`: thresholds and findings; pure
- `run`: the sides, which answer requests, and the run over a recording
- `report`: results as plain values, as text, and as an HTML page
"""
