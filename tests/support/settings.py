"""The settings as a flat list, for the tests of what names them outside of the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from headrace.config import Settings


class Setting(NamedTuple):
    """One value that can be set; `default` is as TOML has it, None where there is none."""

    path: tuple[str, ...]
    default: Any

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "HEADRACE_" + "__".join(self.path).upper()


def all_settings() -> list[Setting]:
    """Every setting of every group, with the default that the type declares."""
    return list(_walk(Settings, ()))


def _walk(model: type[BaseModel], above: tuple[str, ...]) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        group = next(
            (
                kind
                for kind in (field.annotation, *get_args(field.annotation))
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ),
            None,
        )
        if group is not None:
            yield from _walk(group, (*above, name))
        else:
            yield Setting((*above, name), _as_toml(field.get_default()))


def _as_toml(default: Any) -> Any:
    if default is PydanticUndefined:
        return None
    if isinstance(default, SecretStr):
        return default.get_secret_value()
    if isinstance(default, tuple):
        return list(default)
    if isinstance(default, bool | int | float | str | dict) or default is None:
        return default
    return str(default)
