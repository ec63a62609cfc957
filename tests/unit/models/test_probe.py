"""The probe: leakage and rounding are told apart, and neither is seen where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.backends.port import Arrays, check_outputs
from headrace.models.config import make_model_config
from headrace.models.profiling.batch_safety import Batching, Verdict, choose_tolerance
from headrace.models.profiling.probe import probe
from headrace.models.signature import Signature, TensorSpec, make_signature, read_onnx_signature
from headrace.tuning import TUNING
from tests.support import models
from tests.support.models import settings_for
from tests.support.transformer import quantised, transformer

X = TensorSpec("x", "FP32", (-1, 8))
Y = TensorSpec("y", "FP32", (-1, 8))
Rule = Callable[[Any], Any]


def ask(rule: Rule, directory: Path, signature: Signature | None = None, **config: Any) -> Verdict:
    """The verdict on a model that makes `y` of `x` by a rule."""
    signature = signature or make_signature([X], [Y])

    def run(inputs: Arrays) -> Arrays:
        outputs = {"y": rule(inputs["x"])}
        check_outputs(signature, outputs, len(inputs["x"]))
        return outputs

    settings = settings_for(directory)
    return probe(run, signature, make_model_config(config, settings), directory)


def ask_onnx(model: onnx.ModelProto, directory: Path, **config: Any) -> Verdict:
    """The verdict on an ONNX model."""
    path = directory / "model.onnx"
    onnx.save(model, path)
    chosen = make_model_config(config, settings_for(directory))
    signature = read_onnx_signature(path)
    backend = OnnxBackend(directory, chosen, signature)
    backend.load()
    return probe(backend.run, signature, chosen, directory)


def test_transformer_in_fp32_is_batchable(tmp_path: Path) -> None:
    """Attention looks along a row, never across rows."""
    verdict = ask_onnx(transformer(), tmp_path)
    assert verdict.batching is Batching.BATCHABLE
    assert verdict.rounding is not None
    assert verdict.rounding <= 1e-4


def test_dynamically_quantised_transformer_leaks(tmp_path: Path) -> None:
    """Its scale is taken over the whole batch, so that a row's answer depends on its mates."""
    verdict = ask_onnx(quantised(transformer(), tmp_path), tmp_path)
    assert verdict.batching is Batching.NOT_BATCHABLE
    assert verdict.reason.startswith("rows leak: hidden of a row changes by ")


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "BF16", "FP16", "FP64", "INT8", "UINT64"])
def test_probe_compares_every_datatype(tmp_path: Path, datatype: str) -> None:
    """Rows are made up of any of them, and compared."""
    assert ask_onnx(models.identity(datatype), tmp_path).batching is Batching.BATCHABLE


@pytest.mark.parametrize(
    ("leak", "mates"),
    [
        (lambda x: x.sum() * 1e-3, "other ones"),
        (lambda x: np.abs(x).max() > 100, "10,000 times as large"),
        (lambda x: not x[:, 4:].any(axis=1).all(), "zeros"),
        (lambda x: (x[:, 4:] == 0).all(axis=1).any() and (x != 0).any(axis=1).all(), "half empty"),
        (lambda x: np.isnan(x).any(), "not a number"),
    ],
)
def test_probe_finds_leak_shown_by_special_mates(tmp_path: Path, leak: Rule, mates: str) -> None:
    """Some models leak only what is large, empty or no number."""
    verdict = ask(lambda x: x + np.float32(leak(x)), tmp_path)
    assert verdict.batching is Batching.NOT_BATCHABLE
    assert verdict.reason.endswith(f"when the other rows of its batch are {mates}")


def test_probe_reports_leak_below_tolerance(tmp_path: Path) -> None:
    """One bit is enough: that it is small with these mates says nothing of others."""
    verdict = ask(lambda x: x + np.float32(1e-6) * x.sum(), tmp_path)
    assert verdict.reason.startswith("rows leak: y of a row changes by ")


def test_rounding_within_tolerance_is_not_leak(tmp_path: Path) -> None:
    """Alone and batched differ a little, and no mate changes anything."""
    verdict = ask(lambda x: x * np.float32(1 + 1e-5 * (len(x) > 1)), tmp_path)
    assert verdict.batching is Batching.BATCHABLE
    assert verdict.rounding == pytest.approx(1e-5, rel=0.1)


def test_rounding_beyond_tolerance_decides_against_batching(tmp_path: Path) -> None:
    """The reason names the output, and what is tolerated."""
    verdict = ask(lambda x: x * np.float32(1 + 1e-3 * (len(x) > 1)), tmp_path)
    assert verdict.batching is Batching.NOT_BATCHABLE
    assert verdict.reason.startswith("rounding: y of a row alone and in a batch differ by 1.0e-03")
    assert verdict.reason.endswith("batch_tolerance is 1e-04")


def test_probe_uses_declared_tolerance(tmp_path: Path) -> None:
    """A tolerance in the configuration replaces that of the probe."""
    verdict = ask(lambda x: x * np.float32(1 + 1e-3 * (len(x) > 1)), tmp_path, batch_tolerance=0.01)
    assert verdict.batching is Batching.BATCHABLE


def test_noise_of_model_is_not_leak(tmp_path: Path) -> None:
    """A model that varies for an identical batch may vary as much with other rows beside it."""
    random = np.random.default_rng(1)
    verdict = ask(lambda x: x + np.float32(1e-6) * random.random(x.shape, np.float32), tmp_path)
    assert verdict.batching is Batching.BATCHABLE


def test_noise_beyond_tolerance_decides_against_batching(tmp_path: Path) -> None:
    """A leak could hide in it."""
    random = np.random.default_rng(1)
    verdict = ask(lambda x: x + random.random(x.shape, np.float32), tmp_path)
    assert verdict.reason.startswith("two runs of the same batch differ by ")


def test_model_with_constant_output_is_undecided(tmp_path: Path) -> None:
    """Rows that differ have to give outputs that differ."""
    verdict = ask(np.zeros_like, tmp_path)
    assert verdict.batching is Batching.UNDECIDED
    assert verdict.reason == "rows that differ give the same outputs"


def test_model_failing_with_synthetic_inputs_is_undecided(tmp_path: Path) -> None:
    """Its own requests will tell."""

    def choosy(x: Any) -> Any:
        raise ValueError("no pixels like these")

    verdict = ask(choosy, tmp_path)
    assert verdict.batching is Batching.UNDECIDED
    assert verdict.reason == (
        "the model fails with made-up inputs: ValueError: no pixels like these"
    )


def test_probe_skips_mates_refused_by_model(tmp_path: Path) -> None:
    """A model may refuse NaN; that is no fault of its batches."""

    def strict(x: Any) -> Any:
        if np.isnan(x).any():
            raise ValueError("not a number")
        return x * 2

    assert ask(strict, tmp_path).batching is Batching.BATCHABLE


def test_model_of_one_row_is_unbatchable(tmp_path: Path) -> None:
    """The reason is what it raised."""

    def single(x: Any) -> Any:
        if len(x) > 1:
            raise ValueError("one at a time")
        return x

    verdict = ask(single, tmp_path)
    assert verdict.reason == "a run of 2 rows failed with made-up inputs: ValueError: one at a time"
    assert not verdict.has_no_batch


def test_model_returning_other_row_count_is_unbatchable(tmp_path: Path) -> None:
    """Two rows that give one show that dimension 0 is not the batch."""
    verdict = ask_onnx(models.falsely_batched(), tmp_path)
    assert verdict.has_no_batch
    assert verdict.reason.startswith("dimension 0 is not the batch: output y: expected 2 rows")


def test_model_dropping_rows_by_value_is_unbatchable(tmp_path: Path) -> None:
    """Ordinary rows all come out again; those with nothing in them do not."""
    verdict = ask(lambda x: x[x.any(axis=1)], tmp_path)
    assert verdict.batching is Batching.NOT_BATCHABLE
    assert verdict.reason.startswith("dimension 0 is not the batch: output y: expected 4 rows")
    assert verdict.has_no_batch


def test_model_failing_with_more_than_two_rows_is_unbatchable(tmp_path: Path) -> None:
    """Two rows may still share a run where the batch of the probe cannot."""

    def two_rows(x: Any) -> Any:
        if len(x) > 2:
            raise ValueError("two rows at most")
        return x

    verdict = ask(two_rows, tmp_path)
    assert verdict.batching is Batching.NOT_BATCHABLE
    assert verdict.reason.startswith("a run of 4 rows failed with made-up inputs: ")
    assert "two rows at most" in verdict.reason


def test_model_of_fixed_dimension_is_not_probed(tmp_path: Path) -> None:
    """The signature says it all."""
    verdict = ask_onnx(models.unbatched(), tmp_path)
    assert verdict.reason == "dimension 0 of x is fixed at 4"


def test_outputs_of_other_shape_in_batch_are_leak(tmp_path: Path) -> None:
    """A batch that is padded to its longest row changes the shape of the others."""

    def longest(x: Any) -> Any:
        return x[:, : int(np.nanmax(np.abs(x)) // 1) + 1].copy()

    signature = make_signature([X], [TensorSpec("y", "FP32", (-1, -1))])
    verdict = ask(longest, tmp_path, signature)
    assert verdict.reason.startswith("rows leak: y of a row changes its shape")


def test_probe_uses_recorded_inputs_first(tmp_path: Path) -> None:
    """Recorded inputs can tell rows apart where the model treats all random values alike."""
    (tmp_path / "warmup").mkdir()
    np.savez(tmp_path / "warmup" / "one.npz", x=np.full((1, 8), 1000.0, np.float32))
    np.savez(tmp_path / "warmup" / "two.npz", x=np.full((2, 8), 2000.0, np.float32))
    verdict = ask(lambda x: x * (np.abs(x) >= 1000), tmp_path)
    assert (verdict.batching, verdict.seen_with) == (Batching.BATCHABLE, "warmup/one.npz")


def test_probe_inputs_stay_within_range(tmp_path: Path) -> None:
    """Neither made-up rows nor their mates have a value that ingest would refuse."""
    seen: list[float] = []

    def remember(x: Any) -> Any:
        seen.extend([float(x.min()), float(x.max())])
        return x

    verdict = ask(remember, tmp_path, range={"x": [2, 3]})
    assert verdict.batching is Batching.BATCHABLE
    assert np.nanmin(seen) >= 2
    assert np.nanmax(seen) <= 3


def test_slow_model_is_undecided_after_time_limit(tmp_path: Path) -> None:
    """No run starts after the probe's time limit."""
    now_s = iter(range(1000))
    config = make_model_config({}, settings_for(tmp_path))
    signature = make_signature([X], [Y])
    verdict = probe(
        lambda inputs: {"y": inputs["x"]},
        signature,
        config,
        tmp_path,
        clock_s=lambda: float(next(now_s)),
    )
    assert verdict.batching is Batching.UNDECIDED
    assert f"{TUNING.models.probe_budget_s:.0f} s were not enough" in verdict.reason


def test_probe_with_batching_off_checks_only_dimension(tmp_path: Path) -> None:
    """A leak does no harm there."""
    verdict = ask(lambda x: x + x.sum(), tmp_path, max_batch_size=1)
    assert verdict.batching is Batching.BATCHABLE
    assert verdict.rounding is None


def half_precision() -> onnx.ModelProto:
    """FP32 in and out, with weights in FP16 between, as converters leave it."""
    weights = helper.make_tensor("w", TensorProto.FLOAT16, [2, 2], [1.0, 0.5, 0.25, 1.0])
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["half", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT),
    ]
    shape: list[int | str | None] = ["batch", 2]
    return models.make_model(
        nodes, [("x", TensorProto.FLOAT, shape)], [("y", TensorProto.FLOAT, shape)], [weights]
    )


def test_probe_tolerance_follows_precision_of_weights(tmp_path: Path) -> None:
    """Inputs and outputs in FP32 may have FP16 between them."""
    assert ask_onnx(half_precision(), tmp_path).tolerance == 1e-2


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        ({}, 1e-4),
        ({"device": "cuda:0"}, 1e-2),
        (
            {"device": "cuda:0", "provider_options": {"CUDAExecutionProvider": {"use_tf32": 0}}},
            1e-4,
        ),
        ({"device": "cuda:0", "providers": ["TensorrtExecutionProvider"]}, 1e-2),
    ],
)
def test_probe_tolerance_follows_device(
    tmp_path: Path, config: dict[str, Any], tolerance: float
) -> None:
    """A GPU multiplies FP32 as TF32 unless it is told not to."""
    chosen = make_model_config({"experimental_cuda": True} | config, settings_for(tmp_path))
    assert choose_tolerance(chosen, make_signature([X], [Y])) == tolerance
