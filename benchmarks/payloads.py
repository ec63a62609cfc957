"""Requests of a given size, for a model that computes almost nothing, so that only the costs of
size remain.

The model answers with the first numbers of each row. So what is measured is decoding, checking,
gathering, the hops and the answer, which every model of such a size pays as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import helper

from benchmarks.subjects import DISTINCT_REQUESTS, BenchmarkModel
from headrace.protocol.codec import encode_request

ANSWERED = 10
"""Number of values in the answer for each row."""
OPSET = 17
FASTEST_PER_S = 150_000


class PayloadSize(NamedTuple):
    """Size of one row.

    Attributes:
        name: of the size, as the pages have it.
        shape: without the rows.
        batch: rows of a run.
        requests: enough to be measured, and not too many to be kept by a broker here.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DTypeLike
    batch: int
    requests: int

    @property
    def row_bytes(self) -> int:
        """Size of the tensor alone."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def subject(self, scratch: Path) -> BenchmarkModel:
        """Return the model, and requests with random rows."""
        name = f"first{self.row_bytes}"
        repository = scratch / f"{name}-repository"
        path = repository / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(self._model(), path)
        config = f"max_batch_size = {self.batch}\n"
        (repository / name / "model.toml").write_text(config, encoding="utf-8")
        random = np.random.default_rng(1)
        values = [
            encode_request("application/msgpack", name, {"x": row.astype(self.dtype)})
            for row in random.integers(0, 256, (DISTINCT_REQUESTS, 1, *self.shape))
        ]
        kind = f"requests of {self.name}"
        return BenchmarkModel(
            name, kind, repository, path, self.batch, values, FASTEST_PER_S, slow=False
        )

    def _model(self) -> onnx.ModelProto:
        ends = [*[1] * (len(self.shape) - 1), ANSWERED]
        constants = {
            "starts": [0] * len(ends),
            "ends": ends,
            "axes": list(range(1, 1 + len(ends))),
        }
        datatype = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            [helper.make_node("Slice", ["x", *constants], ["y"])],
            "first_numbers",
            [helper.make_tensor_value_info("x", datatype, ["n", *self.shape])],
            [helper.make_tensor_value_info("y", datatype, ["n", *ends])],
            [
                onnx.numpy_helper.from_array(np.array(values, np.int64), name)
                for name, values in constants.items()
            ],
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        onnx.checker.check_model(model)
        return model


PAYLOADS = (
    PayloadSize("4 KB", (1024,), np.float32, batch=32, requests=60_000),
    PayloadSize("150 KB", (3, 224, 224), np.uint8, batch=8, requests=4_000),
)
