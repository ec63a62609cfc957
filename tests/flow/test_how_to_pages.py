"""The pages that lead from a training library to an answer, executed as they stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.support.tree import code_blocks

WORDS = {"[UNK]": 0, "what": 1, "a": 2, "lovely": 3, "dreadful": 4, "day": 5}


def execute(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run code in a namespace of its own, and return what it printed."""
    capsys.readouterr()
    exec(compile(code, "page", "exec"), {"__name__": "page"})
    return capsys.readouterr().out


def classifier_of_texts() -> onnx.ModelProto:
    """Return a graph as a text classifier is exported: the sum of each token's two scores."""
    scores = np.zeros((30522, 2), np.float32)
    scores[WORDS["lovely"]] = [0, 4]
    scores[WORDS["dreadful"]] = [4, 0]
    free = ["batch_size", "sequence_length"]
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["scores", "input_ids"], ["of_tokens"]),
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["mask", "last"], ["weights"]),
            helper.make_node("Mul", ["of_tokens", "weights"], ["masked"]),
            helper.make_node("ReduceSum", ["masked", "sequence"], ["logits"], keepdims=0),
        ],
        "classifier",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, free),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, free),
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch_size", 2])],
        [
            numpy_helper.from_array(scores, "scores"),
            numpy_helper.from_array(np.array([2], np.int64), "last"),
            numpy_helper.from_array(np.array([1], np.int64), "sequence"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.slow
def test_scikit_learn_page_model_answers_like_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All code of the page runs in order; its assertions compare with scikit-learn."""
    monkeypatch.chdir(tmp_path)
    printed = execute("\n".join(code_blocks("from-scikit-learn.md", "python")), capsys)
    assert "[b'setosa' b'setosa' b'setosa']" in printed


@pytest.mark.slow
def test_transformers_page_model_answers_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's files serve a graph and a tokenizer of the same form as an export's."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models" / "sentiment"
    (model / "1").mkdir(parents=True)
    onnx.save(classifier_of_texts(), model / "1" / "model.onnx")
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(model / "1" / "tokenizer.json"))
    (configuration,) = code_blocks("from-transformers.md", "toml")
    (model / "model.toml").write_text(configuration, encoding="utf-8")
    (labels,) = code_blocks("from-transformers.md", "text")
    (model / "labels.txt").write_text(labels, encoding="utf-8")
    (call,) = code_blocks("from-transformers.md", "python")

    assert execute(call, capsys).endswith("[b'POSITIVE']\n")
