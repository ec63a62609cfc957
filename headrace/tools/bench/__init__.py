"""Load tests of a pipeline, at a fixed rate or at saturation.

- `arrivals`: times at which requests are due;
- `payloads`: request contents, from a file, a capture or a model's signature;
- `load`: sends requests and reads answers;
- `histogram` and `measured`: latencies, and the timings reported by answers;
- `advice`: the bottleneck, by rules.
"""
