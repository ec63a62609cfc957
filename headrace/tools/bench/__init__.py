"""Load on a pipeline: requests at a rate, or as many as it takes, and what became of them.

- `arrivals`: when requests are due;
- `payloads`: what is sent, from a file, a capture or a model's signature;
- `load`: sends and reads answers;
- `histogram` and `measured`: latencies, and what answers say of where their time went;
- `advice`: what binds, by rules.
"""
