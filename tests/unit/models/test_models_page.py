"""The page on models against the code: the keys of `model.toml`, and the example in Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from click.testing import CliRunner
from pydantic_core import PydanticUndefined

from headrace.cli import main
from headrace.models.config import ModelConfig
from tests.support.models import settings_for
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (.+?) \|", flags=re.MULTILINE)


def keys() -> dict[str, object]:
    """The keys that the page explains, with their defaults there; None where it says "none"."""
    section = PAGE.partition("\n## model.toml\n")[2].partition("\n## ")[0]
    told: dict[str, object] = {}
    for names, default in ROW.findall(section):
        toml = "" if default == "none" else f"value = {default.strip('`')}"
        for name in re.findall(r"\w+", names):
            told[name] = tomllib.loads(toml).get("value")
    return told


def test_models_page_lists_every_key_with_default() -> None:
    """The table has all keys of `model.toml`, no others, and what they are when left out."""
    declared = {name: field.get_default() for name, field in ModelConfig.model_fields.items()}

    assert PydanticUndefined not in declared.values()
    assert keys() == {
        name: list(default) if isinstance(default, tuple) else default
        for name, default in declared.items()
    }


def test_python_model_of_page_can_be_served(tmp_path: Path) -> None:
    """`headrace models check` finds the page's example ready."""
    example = re.search(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert example is not None
    version = tmp_path / "greeting" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(example[1], encoding="utf-8")
    (tmp_path / "greeting" / "model.toml").write_text('backend = "python"\n', encoding="utf-8")

    result = CliRunner().invoke(main, ["models", "check"], obj=settings_for(tmp_path))

    assert result.exit_code == 0
    assert result.stdout.startswith("greeting/1: ready\n  batchable")
