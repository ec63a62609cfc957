"""ONNX models on ONNX Runtime's CPU provider."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from headrace.config import make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.backends.onnx_session import intra_op_threads
from headrace.models.backends.port import ModelFailed, WarmUp
from headrace.models.backends.warmup import warm_up
from headrace.models.config import ModelConfig, make_model_config
from headrace.models.signature import read_onnx_signature
from headrace.primitives.child_process import import_path
from headrace.protocol.tensors import DATATYPES
from tests.support import models

CUDA = {"device": "cuda:0", "experimental_cuda": True}

Make = Callable[..., OnnxBackend]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a backend of a model, not loaded yet; keywords are lines of `model.toml`."""

    def of(model: onnx.ModelProto, **config: Any) -> OnnxBackend:
        directory = models.add_version(tmp_path, "model", 1, model)
        signature = read_onnx_signature(directory / "model.onnx")
        settings = models.settings_for(tmp_path)
        return OnnxBackend(directory, make_model_config(config, settings), signature)

    return of


@pytest.fixture
def load(make: Make) -> Make:
    """The same, loaded."""

    def of(model: onnx.ModelProto, **config: Any) -> OnnxBackend:
        backend = make(model, **config)
        backend.load()
        return backend

    return of


def sample_of(datatype: str) -> np.ndarray[Any, Any]:
    """Two rows of two values that are not the same."""
    if datatype == "BYTES":
        return np.array([[b"", "é\0".encode()], [b"c", b"dd"]], dtype=object)
    return np.array([[0, 1], [1, 0]]).astype(DATATYPES[datatype].dtype)


def test_onnx_outputs_are_returned_by_name(load: Make) -> None:
    """A run gives every output of the signature."""
    outputs = load(models.digits()).run({"pixels": np.ones((3, 64), np.float32)})
    np.testing.assert_array_equal(outputs["scores"], np.tile(np.arange(10) * 64.0, (3, 1)))


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_passes_onnx_runtime_unchanged(load: Make, datatype: str) -> None:
    """An output has the datatype of its input, `BYTES` and bfloat16 included."""
    given = sample_of(datatype)
    [output] = load(models.identity(datatype)).run({"x": given}).values()
    assert output.dtype == DATATYPES[datatype].dtype
    np.testing.assert_array_equal(output, given)


def test_read_only_bfloat16_input_is_accepted(load: Make) -> None:
    """Arrays are views of records, which cannot be written to."""
    given = np.frombuffer(b"\x80\x3f\x00\x40", ml_dtypes.bfloat16).reshape(1, 2)
    outputs = load(models.identity("BF16")).run({"x": given})
    assert outputs["y"].tolist() == [[1.0, 2.0]]


def test_strings_beside_bfloat16_are_refused(make: Make) -> None:
    """ONNX Runtime's Python interface has no way for both; the message names the tensor."""
    model = models.make_model(
        [
            helper.make_node("Identity", ["a"], ["c"]),
            helper.make_node("Identity", ["b"], ["d"]),
        ],
        [("a", 16, ["n"]), ("b", 8, ["n"])],
        [("c", 16, ["n"]), ("d", 8, ["n"])],
    )
    with pytest.raises(ConfigurationError, match=r"expected no BYTES beside BF16.*; got b"):
        make(model).load()


def test_string_that_is_not_utf8_is_rejected(load: Make) -> None:
    """The rest of the batch is not to blame, so it is the input's fault, not the model's."""
    backend = load(models.identity("BYTES", ["n"]))
    with pytest.raises(Rejected) as caught:
        backend.run({"x": np.array([b"\xff"], dtype=object)})
    assert caught.value.code == Code.INVALID_TENSOR


def test_failing_onnx_run_raises(load: Make) -> None:
    """An index out of range is an exception, not another provider and not a wrong answer."""
    backend = load(models.embedding(rows=8))
    with pytest.raises(Exception, match="indices element out of data bounds, idx=8"):
        backend.run({"index": np.array([[0], [8]])})
    assert backend.run({"index": np.array([[7]])})["vector"].shape == (1, 1, 4)


def test_output_of_other_row_count_is_failure(load: Make) -> None:
    """Splitting it would give each request another's numbers."""
    backend = load(models.falsely_batched())
    with pytest.raises(ModelFailed, match=r"output y: expected 3 rows in dimension 0, got.*\[1, 2"):
        backend.run({"x": np.ones((3, 2), np.float32)})


def test_warm_up_of_sound_model_finds_nothing(load: Make) -> None:
    """Batching stays on."""
    assert load(models.tokens()).warm_up() == WarmUp()


def test_warm_up_finds_that_larger_batches_fail(load: Make) -> None:
    """One row runs and two do not: the model is served, and batching is off with the reason."""
    fault = load(models.falsely_batched()).warm_up().batching_fault
    assert fault.startswith("a run of 2 rows failed at warm-up with made-up")


def rows_at_warm_up(directory: Path, **config: Any) -> list[int]:
    """Return the sizes of the runs with which `digits` is warmed up."""
    version = models.add_version(directory, "model", 1, models.digits())
    signature = read_onnx_signature(version / "model.onnx")
    rows: list[int] = []
    warm_up(
        lambda inputs: rows.append(len(inputs["pixels"])),
        signature,
        make_model_config(config, models.settings_for(directory)),
        version,
    )
    return rows


def test_warm_up_runs_powers_of_two_up_to_limit(tmp_path: Path) -> None:
    """The limit itself is run as well."""
    assert rows_at_warm_up(tmp_path, max_batch_size=12) == [1, 2, 4, 8, 12]


def test_warm_up_stays_within_byte_limit(tmp_path: Path) -> None:
    """A batch never has more bytes than `max_batch_bytes`, so a larger one is not tried."""
    assert rows_at_warm_up(tmp_path, max_batch_bytes=5 * 256) == [1, 2, 4, 5]


def test_warm_up_inputs_stay_within_range(load: Make) -> None:
    """Made-up values are allowed ones."""
    backend = load(models.embedding(), range={"index": [3, 7]}, max_batch_size=1)
    assert backend.warm_up() == WarmUp()


def test_warm_up_failing_with_synthetic_rows_is_skipped(load: Make) -> None:
    """A model need not accept them; the reason says how real ones are given."""
    backend = load(models.embedding(rows=8), range={"index": [8, 9]})
    omitted = backend.warm_up().omitted
    assert "out of data bounds" in omitted
    assert omitted.endswith(
        "put real rows into warmup/rows.npz of the version, an array for each input"
    )


def test_warm_up_runs_samples_of_model(load: Make, tmp_path: Path) -> None:
    """Samples in `warmup/*.npz` take the place of made-up inputs."""
    backend = load(models.embedding(rows=8))
    directory = tmp_path / "model" / "1" / "warmup"
    directory.mkdir()
    np.savez(directory / "one.npz", index=np.array([[8]]))
    with pytest.raises(ConfigurationError, match=r"warm-up with warmup/one\.npz.*out of data bou"):
        backend.warm_up()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros((1, 1))}, "expected index, got other"),
        ({"index": np.zeros((1, 2), np.int64)}, r"index: expected \[-1, 1\], got \[1, 2\]"),
        ({"index": np.zeros((1, 1), np.int32)}, "index: expected INT64, got int32"),
    ],
    ids=["name", "shape", "dtype"],
)
def test_warm_up_sample_that_does_not_fit_is_refused(
    load: Make, tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    """The message names the file, and what was expected."""
    backend = load(models.embedding())
    directory = tmp_path / "model" / "1" / "warmup"
    directory.mkdir()
    np.savez(directory / "one.npz", **arrays)
    with pytest.raises(ConfigurationError, match=message):
        backend.warm_up()


def test_cancel_ends_onnx_run(load: Make) -> None:
    """A run that would take minutes ends with an exception, and the next one is not affected."""
    backend = load(models.slow())
    pixels = np.ones((1, 64), np.float32)
    timer = threading.Timer(0.05, backend.cancel)
    timer.start()
    with pytest.raises(Exception, match="terminate flag"):
        backend.run({"times": np.array(10**9), "x": pixels})
    timer.join()
    assert backend.run({"times": np.array(1), "x": pixels})["y"].shape == (1, 64)


def test_late_cancel_does_not_end_next_onnx_run(load: Make) -> None:
    """A cancel is for the run under way."""
    backend = load(models.digits())
    backend.cancel()
    assert backend.run({"pixels": np.ones((1, 64), np.float32)})


def test_broken_graph_is_refused_at_load(make: Make) -> None:
    """The error of ONNX Runtime is passed on, with the path."""
    model = models.identity("FP32")
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ConfigurationError, match=r"1/model\.onnx: .*NoSuchOperator"):
        make(model).load()


def test_runtime_keeps_nothing_for_its_makers_telemetry(tmp_path: Path) -> None:
    """As it is, a release from 1.29 on would keep a number of the machine, and send it to them.

    In a process of its own, because it is decided once, and without the variables of CI, which turn
    it off as well.
    """
    repository, home = tmp_path / "models", tmp_path / "home"
    home.mkdir()
    models.add_version(repository, "digits", 1, models.digits())
    environment = {"HOME": str(home), "HEADRACE_MODELS__REPOSITORY": str(repository)}
    subprocess.run(
        [sys.executable, "-m", "headrace", "models", "check"],
        env=import_path() | environment,
        check=True,
    )
    assert [*home.rglob("*")] == []


def test_provider_that_is_not_installed_is_refused(make: Make) -> None:
    """The message says what was expected and what there is."""
    with pytest.raises(
        ConfigurationError, match="expected TensorrtExecutionProvider for device cuda:0; the inst"
    ):
        make(models.digits(), **CUDA, providers=["TensorrtExecutionProvider"]).load()


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_session_falling_back_to_cpu_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime lists providers whose device is missing and then makes a session without."""
    monkeypatch.setattr(
        onnxruntime,
        "get_available_providers",
        lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
    )
    with pytest.raises(
        ConfigurationError, match=r"expected to run on CUDAExecutionProvider \(cuda:0\), got CPUEx"
    ):
        make(models.digits(), **CUDA).load()


class Told:
    """In place of a session: what ONNX Runtime was told."""

    def __init__(self, _: object, **arguments: Any) -> None:
        self.options = arguments["sess_options"]
        [self.provider_options] = arguments["provider_options"]
        self.has_fallback = True

    def get_providers(self) -> list[str]:
        return ["CUDAExecutionProvider"]

    def disable_fallback(self) -> None:
        self.has_fallback = False


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """Return the sessions made from now on, in a process that believes it has a GPU."""
    sessions: list[Told] = []

    def make_session(file: object, **arguments: Any) -> Told:
        sessions.append(Told(file, **arguments))
        return sessions[-1]

    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "InferenceSession", make_session)
    return sessions


def test_gpu_session_gets_common_options(make: Make, told: list[Told]) -> None:
    """Nothing moves to another provider, no thread spins, and the model's own options go over."""
    own = {"CUDAExecutionProvider": {"cudnn_conv_algo_search": "EXHAUSTIVE", "use_tf32": False}}
    make(models.digits(), **CUDA, gpu_memory_limit_bytes=2**30, provider_options=own).load()
    [session] = told
    assert session.provider_options == {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "EXHAUSTIVE",
        "gpu_mem_limit": str(2**30),
        "use_tf32": "0",
    }
    assert not session.has_fallback
    assert session.options.intra_op_num_threads == 1
    assert session.options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.parametrize("graphs", [True, False])
def test_gpu_session_gets_stream_of_ring(make: Make, told: list[Told], graphs: bool) -> None:
    """The session captures graphs where that is configured."""
    backend = make(models.digits(), **CUDA)
    backend.use_stream(1234, graphs=graphs)
    backend.load()
    [session] = told
    options = session.provider_options
    assert options["user_compute_stream"] == "1234"
    assert options["enable_cuda_graph"] == str(int(graphs))


def test_threads_are_shared_between_instances() -> None:
    """Two instances on eight cores take four each; a configured number holds."""
    cores = range(8)
    assert intra_op_threads(ModelConfig(instances=2), cores) == 4
    assert intra_op_threads(ModelConfig(instances=9), cores) == 1
    assert intra_op_threads(ModelConfig(intra_op_threads=3), cores) == 3
    assert intra_op_threads(ModelConfig(device="cuda:0", experimental_cuda=True), cores) == 1


def test_threads_are_shared_between_processes() -> None:
    """A process with a quarter of eight cores has two; those of pinned threads are its own."""
    settings = make_settings({"executor": {"cores": "3/4"}})
    for values, threads in [({}, 2), ({"instances": 2}, 1), ({"instances": 4}, 1)]:
        assert intra_op_threads(make_model_config(values, settings), range(8)) == threads
    assert intra_op_threads(make_model_config({"pinned": True}, settings), {4, 5}) == 2


def uppercasing() -> onnx.ModelProto:
    """`x` to `y` in upper case, by an operator of onnxruntime-extensions."""
    model = models.make_model(
        [helper.make_node("StringUpper", ["x"], ["y"], domain="ai.onnx.contrib")],
        [("x", DATATYPES["BYTES"].onnx, ("batch", 1))],
        [("y", DATATYPES["BYTES"].onnx, ("batch", 1))],
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.contrib", 1))
    return model


def test_operators_of_extensions_run_where_configured(load: Make) -> None:
    """A graph may have its pre- and postprocessing in it."""
    outputs = load(uppercasing(), extensions=True).run({"x": np.array([[b"ab"]], object)})
    assert outputs["y"].tolist() == [[b"AB"]]


def test_operators_of_extensions_are_named_without_the_setting(load: Make) -> None:
    """The model cannot be loaded."""
    with pytest.raises(ConfigurationError, match=r"ai\.onnx\.contrib:StringUpper"):
        load(uppercasing())


def test_missing_extensions_are_named_with_their_extra(
    monkeypatch: pytest.MonkeyPatch, load: Make
) -> None:
    """The version cannot be served, and the reason says what to install."""
    monkeypatch.setitem(sys.modules, "onnxruntime_extensions", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'headrace\[extensions\]'"):
        load(uppercasing(), extensions=True)


def test_extensions_of_a_model_in_python_are_refused() -> None:
    """It has no graph."""
    with pytest.raises(ConfigurationError, match="extensions: expected only with backend = onnx"):
        make_model_config({"backend": "python", "extensions": True}, make_settings({}))
