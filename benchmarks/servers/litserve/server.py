"""LitServe with ONNX Runtime and dynamic batching, as its documentation shows."""

from __future__ import annotations

import os
import sys
from typing import Any

import litserve
import numpy as np
import onnxruntime
from numpy.typing import NDArray


class Digits(litserve.LitAPI):
    """The model; LitServe stacks the decoded requests of a batch before `predict`."""

    def setup(self, device: str) -> None:
        """Open the session."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["MODEL_THREADS"])
        self._session = onnxruntime.InferenceSession(os.environ["MODEL_ONNX"], options)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Return the row of a request. An annotation would choose another parser of the body."""
        return np.array(request["pixels"], np.float32)

    def predict(self, batch: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
        """Run a batch."""
        labels, probabilities = self._session.run(["label", "probabilities"], {"pixels": batch})
        return list(zip(labels, probabilities, strict=True))

    def encode_response(self, output):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Return the answer to a request."""
        label, probabilities = output
        return {"label": int(label), "probabilities": probabilities.tolist()}


if __name__ == "__main__":
    api = Digits(max_batch_size=32, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )
