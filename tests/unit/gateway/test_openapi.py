"""The description of the door for HTTP in OpenAPI: valid, current, and named without gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from openapi_spec_validator import OpenAPIV31SpecValidator

from headrace.gateway.openapi import describe, main
from tests.support.tree import ROOT


def test_openapi_document_is_valid() -> None:
    """The document satisfies the meta-schema of OpenAPI 3.1, and the rules beside it."""
    OpenAPIV31SpecValidator(describe()).validate()


def test_openapi_file_matches_types() -> None:
    """`make schemas` has been run after the last change of a type."""
    text = (ROOT / "schemas" / "openapi.json").read_text(encoding="utf-8")

    assert json.loads(text) == describe()


def test_stale_openapi_file_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails with the way out, and writing is that way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schemas").mkdir()
    runner = CliRunner()

    missing = runner.invoke(main, ["--check"])
    runner.invoke(main)

    assert (missing.exit_code, "make schemas" in missing.output) == (1, True)
    assert runner.invoke(main, ["--check"]).exit_code == 0
