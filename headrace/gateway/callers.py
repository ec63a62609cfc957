"""Who may call what at the doors: API keys, and the groups of methods that each key opens.

A key is a random text that its caller sends with each call; the gateway's file holds only its
SHA-256. That is enough, because nobody can guess a key of 256 random bits: slow hashes protect
passwords. Looking a hash up tells nothing about the keys that are in the file.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from headrace.config import GatewaySettings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.gateway.watched import Watched, read_file

BEARER = "bearer "


class Group(StrEnum):
    """The groups of methods that are opened together, like Triton's restricted protocols."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    REPOSITORY = "repository"


class Denied(Rejected):
    """The caller is not known, or may not call this."""

    def __init__(self, message: str, *, is_known: bool) -> None:
        super().__init__(Code.INVALID_REQUEST, message)
        self.is_known = is_known


class _Entry(Struct, forbid_unknown_fields=True):
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    groups: list[Group] = msgspec.field(default_factory=lambda: list(Group))


class _KeysFile(Struct, forbid_unknown_fields=True):
    callers: dict[Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")], _Entry]
    public: list[Group] = msgspec.field(default_factory=lambda: [Group.HEALTH])


class _Caller(NamedTuple):
    name: str
    groups: frozenset[Group]


class _Keys(NamedTuple):
    public: frozenset[Group]
    callers: dict[str, _Caller]
    """By the SHA-256 of their keys."""


Keys: TypeAlias = Watched[_Keys]


class Callers:
    """Decides who calls, and whether the caller may.

    Args:
        settings: `gateway.keys_file`.
        check_interval_s: between two looks at the file.

    Raises:
        ConfigurationError: the file cannot be used.
    """

    def __init__(self, settings: GatewaySettings, check_interval_s: float) -> None:
        self._keys: Keys | None = None
        if settings.keys_file is not None:
            file = settings.keys_file
            self._keys = Watched([file], partial(_load, file), check_interval_s)

    @property
    def are_known(self) -> bool:
        """Return True if callers have keys."""
        return self._keys is not None

    def admit(self, group: Group, authorization: str, key: str) -> str:
        """Return the caller's name; empty if it needs none.

        Args:
            group: of the method.
            authorization: value of the header `Authorization`; empty if absent.
            key: value of the header `X-API-Key`; empty if absent.

        Raises:
            Denied: the caller sends no key or an unknown one, and the group is not public; or its
                key does not open the group.
        """
        if self._keys is None:
            return ""
        keys = self._keys.current()
        if not key and authorization[: len(BEARER)].lower() == BEARER:
            key = authorization[len(BEARER) :].strip()
        caller = None
        if key:
            caller = keys.callers.get(hashlib.sha256(key.encode("utf-8", "replace")).hexdigest())
        if caller is not None and group in caller.groups:
            return caller.name
        if group in keys.public:
            return ""
        if caller is not None:
            raise Denied(f"the key of {caller.name} does not open {group}", is_known=True)
        got = "one that is not known" if key else "none"
        expected = "expected an API key in Authorization: Bearer or in X-API-Key"
        raise Denied(f"{group}: {expected}, got {got}", is_known=False)


def _load(file: Path) -> _Keys:
    content = read_file("keys_file", file)
    try:
        found = msgspec.toml.decode(content, type=_KeysFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigurationError(
            f"gateway.keys_file: {file}: expected [callers.NAME] with sha256 and groups: {error}"
        ) from error
    callers: dict[str, _Caller] = {}
    for name, entry in found.callers.items():
        if entry.sha256 in callers:
            other = callers[entry.sha256].name
            raise ConfigurationError(
                f"gateway.keys_file: {file}: expected a key of its own for each caller, "
                f"{name} has that of {other}"
            )
        callers[entry.sha256] = _Caller(name, frozenset(entry.groups))
    return _Keys(frozenset(found.public), callers)
