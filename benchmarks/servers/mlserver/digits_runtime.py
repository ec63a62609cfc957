"""MLServer with ONNX Runtime: a custom runtime, as its documentation shows."""

from __future__ import annotations

import os

import numpy as np
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Digits(MLModel):
    """The model; MLServer merges the requests of a batch into one before `predict`."""

    async def load(self) -> bool:
        """Open the session."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["MODEL_THREADS"])
        path = os.environ["MODEL_ONNX"]
        self._session = onnxruntime.InferenceSession(path, options)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run a batch."""
        pixels = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        found = self._session.run(["label", "probabilities"], {"pixels": pixels.astype(np.float32)})
        outputs = [
            NumpyCodec.encode_output(name, value)
            for name, value in zip(("label", "probabilities"), found, strict=True)
        ]
        return InferenceResponse(model_name=self.name, outputs=outputs)
