"""Every line that Headrace logs has a name from the one list, and every name is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from headrace.telemetry.logs import Event
from tests.support.tree import Module, modules

METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def log_calls(module: Module) -> Iterator[ast.Call]:
    """Calls of a method of a variable that is called `log`."""
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in {"log", "logger", "_log"}
            and node.func.attr in METHODS
        ):
            yield node


def name_of(call: ast.Call) -> str:
    """The event, in the words of the code; `log` has the level first."""
    assert isinstance(call.func, ast.Attribute)
    place = 1 if call.func.attr == "log" else 0
    return ast.unparse(call.args[place]) if len(call.args) > place else ""


def test_log_events_are_named_in_list() -> None:
    """No call passes a text of its own; `event` is what a table of the list gave."""
    calls = [
        (module, call) for module in modules("headrace", "services") for call in log_calls(module)
    ]
    strange = [
        f"{module.path}:{call.lineno}: {name_of(call)}"
        for module, call in calls
        if name_of(call) not in {f"Event.{event.name}" for event in Event} | {"event"}
    ]

    assert len(calls) > 20
    assert strange == []


def test_every_listed_log_event_is_logged() -> None:
    """The list holds nothing that is never logged."""
    text = "\n".join(module.text for module in modules("headrace", "services"))

    assert [event.name for event in Event if f"Event.{event.name}" not in text] == []


def test_log_event_names_have_one_form() -> None:
    """`what.happened`, in lower case, each once."""
    names = [event.value for event in Event]

    assert len(names) == len(set(names))
    assert [name for name in names if name != name.lower() or " " in name] == []
