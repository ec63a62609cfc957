"""The model alone: one batch, run repeatedly; no log, no decoding, no answers.

    python -m benchmarks.loops.bare MODEL.onnx BATCH.npy SECONDS THREADS

Prints rows, seconds and processor seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from benchmarks.loops.served import Model


def main() -> None:
    path, batch_file, seconds, threads = sys.argv[1:]
    model, rows = Model(path, int(threads)), np.load(batch_file)
    for _ in range(3):
        model.run(rows)
    runs = 0
    began_s, cpu_s = time.perf_counter(), time.process_time()
    until_s = began_s + float(seconds)
    while (now_s := time.perf_counter()) < until_s:
        model.run(rows)
        runs += 1
    now_s = time.perf_counter()
    found = {
        "rows": runs * len(rows),
        "seconds": now_s - began_s,
        "cpu_s": time.process_time() - cpu_s,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
