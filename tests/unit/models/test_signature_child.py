"""Large ONNX files are read in a child process, with the same outcome."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from msgspec.structs import replace

from headrace.errors import ConfigurationError
from headrace.models.load_faults import is_fault_of_model
from headrace.models.signature import read_onnx_signature
from headrace.models.signature_child import read_large_signature
from headrace.tuning import TUNING
from tests.support.models import digits, tokens

APART = replace(TUNING.models, read_apart_from_bytes=1)


@pytest.mark.parametrize("make", [digits, tokens])
def test_child_reads_same_signature(tmp_path: Path, make: type[onnx.ModelProto]) -> None:
    """Names, datatypes, shapes and names of dimensions."""
    path = tmp_path / "model.onnx"
    onnx.save(make(), path)
    assert read_large_signature(path, APART) == read_onnx_signature(path)


def test_fault_of_file_is_that_of_reading_it_here(tmp_path: Path) -> None:
    """With the path as it was given."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigurationError) as here:
        read_onnx_signature(path)
    with pytest.raises(ConfigurationError) as apart:
        read_large_signature(path, APART)
    assert str(apart.value) == str(here.value)
    assert is_fault_of_model(apart.value)


def test_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """The version is refused, and nothing stays behind."""
    path = tmp_path / "model.onnx"
    onnx.save(digits(), path)
    with pytest.raises(ConfigurationError, match=r"to be read within 0\.001 s, got no end") as late:
        read_large_signature(path, replace(APART, reader_timeout_s=0.001))
    assert not is_fault_of_model(late.value)


def test_child_that_ends_without_reply_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may kill a child, and a child may lack a module."""
    path = tmp_path / "model.onnx"
    onnx.save(digits(), path)
    (tmp_path / "msgspec.py").write_text("raise RuntimeError", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"but it ended with exit code 1$"):
        read_large_signature(path, APART)
