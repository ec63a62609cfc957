"""`headrace models push|pull` between two directories, one of which is used as a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.outcome import Exit
from tests.support.command_line import Call
from tests.support.models import add_version, digits


@pytest.fixture
def repository(tmp_path: Path, call: Call) -> Path:
    """The repository that the default settings name, with a packed version of `digits`."""
    path = tmp_path / "models"
    add_version(path, "digits", 1, digits(), "max_batch_size = 4")
    call("models", "pack", "digits")
    return path


def use_another_repository(tmp_path: Path) -> Path:
    """Let the settings name a directory that does not exist yet."""
    (tmp_path / "headrace.toml").write_text('[models]\nrepository = "others"\n')
    return tmp_path / "others"


def test_pushed_version_is_the_same_after_pull(
    repository: Path, tmp_path: Path, call: Call
) -> None:
    """Files, the configuration and the manifest arrive, and nothing else does."""
    pushed = call("models", "push", "digits", "--to", "store")
    assert (pushed.exit_code, pushed.stderr) == (Exit.DONE, "")
    others = use_another_repository(tmp_path)
    pulled = call("models", "pull", "digits", "--from", "store")
    assert (pulled.exit_code, pulled.stderr) == (Exit.DONE, "")
    assert call("models", "verify").stdout == "digits/1: ok\n"
    assert (others / "digits" / "model.toml").read_text() == "max_batch_size = 4"
    assert [path.name for path in others.iterdir()] == ["digits"]


def test_push_lists_versions_in_index(repository: Path, tmp_path: Path, call: Call) -> None:
    """A web server before the store has no other listing."""
    call("models", "push", "digits", "--to", "store")
    assert json.loads((tmp_path / "store" / "index.json").read_text()) == {"digits": ["1"]}


def test_push_of_unpacked_version_is_refused(repository: Path, call: Call) -> None:
    """The refusal says what to do first."""
    add_version(repository, "digits", 2, digits())
    result = call("models", "push", "digits", "--to", "store")
    assert result.exit_code == Exit.USAGE
    assert "headrace models pack" in result.stderr


def test_push_of_version_changed_after_packing_is_refused(repository: Path, call: Call) -> None:
    """A file that is not in the manifest is not pushed."""
    (repository / "digits" / "1" / "extra").touch()
    result = call("models", "push", "digits", "--to", "store")
    assert result.exit_code == Exit.USAGE
    assert "extra: expected no file" in result.stderr


def test_push_of_another_version_with_a_number_that_is_there_is_refused(
    repository: Path, call: Call
) -> None:
    """A version never changes once it is pushed; the same one may be pushed again."""
    call("models", "push", "digits", "--to", "store")
    assert call("models", "push", "digits", "--to", "store").exit_code == Exit.DONE
    call("models", "pack", "digits", "--metadata", "run=2")
    result = call("models", "push", "digits", "--to", "store")
    assert result.exit_code == Exit.USAGE
    assert "give the new one another number" in result.stderr


def test_pull_of_tampered_version_leaves_nothing(
    repository: Path, tmp_path: Path, call: Call
) -> None:
    """A file that is not what the manifest says does not reach the repository."""
    call("models", "push", "digits", "--to", "store")
    (tmp_path / "store" / "digits" / "1" / "model.onnx").write_bytes(b"other")
    others = use_another_repository(tmp_path)
    result = call("models", "pull", "digits", "--from", "store")
    assert result.exit_code == Exit.USAGE
    assert "model.onnx: expected" in result.stderr
    assert list(others.iterdir()) == []


def test_pull_beside_other_versions_keeps_their_config(
    repository: Path, tmp_path: Path, call: Call
) -> None:
    """`model.toml` belongs to whoever serves the model."""
    call("models", "push", "digits", "--to", "store")
    others = use_another_repository(tmp_path)
    add_version(others, "digits", 2, digits(), "max_batch_size = 8")
    call("models", "pull", "digits", "1", "--from", "store")
    assert call("models", "verify").stdout == "digits/1: ok\ndigits/2: no manifest\n"
    assert (others / "digits" / "model.toml").read_text() == "max_batch_size = 8"


def test_pull_of_version_that_is_here_is_refused(repository: Path, call: Call) -> None:
    """Nothing is overwritten."""
    call("models", "push", "digits", "--to", "store")
    result = call("models", "pull", "digits", "--from", "store")
    assert result.exit_code == Exit.USAGE
    assert "expected no such version yet" in result.stderr


def test_pull_of_absent_version_names_those_there(repository: Path, call: Call) -> None:
    """The refusal says which versions the store has."""
    call("models", "push", "digits", "--to", "store")
    result = call("models", "pull", "digits", "3", "--from", "store")
    assert result.exit_code == Exit.USAGE
    assert "expected one of 1, got 3" in result.stderr


def test_push_to_unknown_kind_of_store_is_refused(repository: Path, call: Call) -> None:
    """The refusal lists the kinds."""
    result = call("models", "push", "digits", "--to", "ftp://host/models")
    assert result.exit_code == Exit.USAGE
    assert "s3://, gs://, az://, https://, got ftp://" in result.stderr
