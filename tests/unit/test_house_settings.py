"""The example configuration against the settings that the code has."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from headrace.config import make_settings
from tests.support.settings import Setting, all_settings
from tests.support.tree import ROOT

EXAMPLE = ROOT / "deploy" / "headrace.example.toml"
COMMENTED_OUT = re.compile(r"^# (?=\[|\w+ = )", flags=re.MULTILINE)


@pytest.mark.parametrize("setting", all_settings(), ids=lambda setting: ".".join(setting.path))
def test_settings_example_shows_each_default(setting: Setting) -> None:
    """The example names the setting; where the code has a default, it is the one shown."""
    shown = flat(tomllib.loads(with_comments_opened()))

    assert setting.path in shown
    assert setting.default in (None, shown[setting.path])


def test_settings_example_names_only_settings_of_code() -> None:
    """Every key of the example, commented out or not, is a setting."""
    shown = flat(tomllib.loads(with_comments_opened()))

    assert set(shown) <= {setting.path for setting in all_settings()}


def test_settings_example_equals_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the example as `headrace.toml` gives the same settings as no file at all."""
    for setting in all_settings():
        monkeypatch.delenv(setting.variable, raising=False)

    assert make_settings(tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))) == make_settings({})


def with_comments_opened() -> str:
    """The example with the commented-out settings in force, but for the names of topics."""
    text = EXAMPLE.read_text(encoding="utf-8")
    text = text.replace('# requests = "orders.to-score"', "")
    return COMMENTED_OUT.sub("", text)


def flat(table: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The values of a TOML document by their full key; an empty table counts as a value."""
    values: dict[tuple[str, ...], Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            values |= flat(value, (*above, key))
        else:
            values[(*above, key)] = value
    return values
