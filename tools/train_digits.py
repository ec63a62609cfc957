"""Train the digits classifier of `headrace demo`, and write it with its test images.

The data are the UCI "Optical Recognition of Handwritten Digits" set (E. Alpaydin and C. Kaynak,
1998, https://doi.org/10.24432/C50P49, CC BY 4.0) as scikit-learn carries it: 1,797 images of
8 × 8 pixels with values from 0 to 16. A fifth of them, drawn evenly from the ten digits, is held
out; those images and their labels are what the demo sends.

Usage: `python tools/train_digits.py`, with the dependency group `train` installed. Seeds are
fixed; the weights may still differ in their last bits from one linear algebra library to another.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

SEED = 20
HIDDEN_UNITS = 64
MAX_PIXEL = 16.0
TEST_IMAGES = 360
# Old enough for every ONNX Runtime that Headrace supports.
OPSET = 17
IR_VERSION = 9

DEMO = Path(__file__).parent.parent / "headrace" / "tools" / "demo"
MODEL_FILE = DEMO / "models" / "digits" / "1" / "model.onnx"
IMAGES_FILE = DEMO / "digits_test.npz"

Array = npt.NDArray[np.generic]


def main() -> None:
    pixels, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, labels, test_size=TEST_IMAGES, stratify=labels, random_state=SEED
    )
    classifier = MLPClassifier(
        hidden_layer_sizes=(HIDDEN_UNITS,), alpha=1e-2, max_iter=600, random_state=SEED
    )
    classifier.fit(train_x / MAX_PIXEL, train_y)
    model = to_onnx(classifier)
    right = int(np.sum(predict(model, test_x) == test_y))
    accuracy = f"{right} of {len(test_y)} held-out images right ({right / len(test_y):.1%})"
    describe(model, accuracy)
    onnx.checker.check_model(model, full_check=True)

    MODEL_FILE.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, MODEL_FILE)
    np.savez_compressed(IMAGES_FILE, pixels=test_x.astype(np.uint8), labels=test_y.astype(np.uint8))
    print(f"{accuracy}; model {MODEL_FILE.stat().st_size} bytes, {len(train_y)} images trained on")


def to_onnx(classifier: MLPClassifier) -> onnx.ModelProto:
    """The network as ONNX, with the scaling of the pixels in front and the argmax behind."""
    (hidden_weight, output_weight), (hidden_bias, output_bias) = (
        classifier.coefs_,
        classifier.intercepts_,
    )
    weights = {
        "scale": np.array(1 / MAX_PIXEL),
        "hidden.weight": hidden_weight,
        "hidden.bias": hidden_bias,
        "output.weight": output_weight,
        "output.bias": output_bias,
    }
    graph = helper.make_graph(
        name="digits",
        nodes=[
            helper.make_node("Mul", ["pixels", "scale"], ["scaled"]),
            helper.make_node("Gemm", ["scaled", "hidden.weight", "hidden.bias"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["activated"]),
            helper.make_node("Gemm", ["activated", "output.weight", "output.bias"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
            helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
        ],
        inputs=[helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 64])],
        outputs=[
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10]),
            helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"]),
        ],
        initializer=[
            numpy_helper.from_array(np.asarray(value, dtype=np.float32), name)
            for name, value in weights.items()
        ],
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="headrace/tools/train_digits.py",
    )


def predict(model: onnx.ModelProto, pixels: Array) -> Array:
    """The labels by ONNX's own reference implementation, for float pixels of shape [n, 64]."""
    inputs = {"pixels": pixels.astype(np.float32)}
    (labels,) = ReferenceEvaluator(model).run(["label"], inputs)
    return np.asarray(labels)


def describe(model: onnx.ModelProto, accuracy: str) -> None:
    model.doc_string = (
        "Handwritten digits of 8 x 8 pixels, values 0 to 16, row by row. "
        f"Test accuracy: {accuracy}. Trained by tools/train_digits.py on the UCI data set "
        "Optical Recognition of Handwritten Digits (doi:10.24432/C50P49, CC BY 4.0)."
    )
    helper.set_model_props(model, {"test_accuracy": accuracy})


if __name__ == "__main__":
    main()
