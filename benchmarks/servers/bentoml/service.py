"""BentoML with ONNX Runtime and adaptive batching, as its documentation shows."""

from __future__ import annotations

import os

import bentoml
import numpy as np
import onnxruntime


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Digits:
    """The model; BentoML concatenates the arrays of the requests of a batch."""

    def __init__(self) -> None:
        """Open the session."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["MODEL_THREADS"])
        self._session = onnxruntime.InferenceSession(os.environ["MODEL_ONNX"], options)

    @bentoml.api(batchable=True, max_batch_size=32)
    def predict(self, pixels: np.ndarray) -> np.ndarray:
        """Run a batch; a row of the answer is the label and the probabilities."""
        found = self._session.run(["label", "probabilities"], {"pixels": pixels.astype(np.float32)})
        return np.column_stack(found)
