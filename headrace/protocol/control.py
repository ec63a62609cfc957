"""Records of the control topic: changes of the models that a deployment is to serve.

Like the other messages (`headrace.protocol.messages`) they are MessagePack maps: unknown fields
are ignored, new fields have defaults, and no field is renamed. The records are read for as long as
the topic exists, so a field that changes what a reader must do raises `FORMAT`.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

FORMAT: Final = 2
"""The newest format of control records. A reader refuses later ones: it would miss changes.

Records in which no model has overrides keep format 1, so that processes of the release before
follow them.
"""
FORMAT_WITHOUT_OVERRIDES: Final = 1


class WantedModel(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Versions of one model that are to be loaded.

    `versions` are numbers in ascending order, at least one. `default` is the one that requests
    without a version get, and `labels` name others of them. `overrides` are values for keys of the
    model's `model.toml`, instead of those that are there. `reads` becomes larger when its files are
    to be read again although nothing else changes. `compatible` names for a version the one
    that was the default when it was first wanted: a version whose inputs and outputs would break
    callers of that one is not served.
    """

    versions: list[str]
    default: str
    labels: dict[str, str] = {}
    overrides: dict[str, Any] = {}
    reads: int = 0
    compatible: dict[str, str] = {}


class ControlRecord(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One change of the models that a deployment is to serve.

    `generation` counts the changes from 1. `before` and `after` have the models that it changes;
    None is a model of which nothing is to be loaded. `action` is a word such as `load`, and
    `change_id` was drawn by the writer to recognise its own record. Every so many changes
    `snapshot` has all models after the change, with which reading may begin, and `former` the
    versions that their labels and, under "", their defaults meant before, as far as these are still
    to be loaded, the latest first.
    """

    format: int
    generation: int
    change_id: str
    at_ms: int
    who: str
    why: str = ""
    action: str
    before: dict[str, WantedModel | None]
    after: dict[str, WantedModel | None]
    snapshot: dict[str, WantedModel] | None = None
    former: dict[str, dict[str, list[str]]] = {}
