"""Who may call what at the doors, and how much: API keys, the groups of methods that each key
opens, and limits.

A key is a random text that its caller sends with each call; the gateway's file holds only its
SHA-256. That is enough, because nobody can guess a key of 256 random bits: slow hashes protect
passwords. Looking a hash up tells nothing about the keys that are in the file.
"""

from __future__ import annotations

import hashlib
import ipaddress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from headrace.config import GatewaySettings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.gateway.limits import Limits
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


class Credentials(NamedTuple):
    """What a call shows of its caller; each is empty if absent.

    Attributes:
        authorization: value of the header `Authorization`.
        key: value of the header `X-API-Key`.
        address: of the other end of the connection, without its port.
    """

    authorization: str = ""
    key: str = ""
    address: str = ""


class Caller(NamedTuple):
    """A caller that may call.

    Attributes:
        tenant: of its requests; empty if it has no login.
        limited_as: what its requests are counted by, and its name in errors.
        limits: of its requests; None if there are none.
    """

    tenant: str = ""
    limited_as: str = ""
    limits: Limits | None = None


Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)]


class _Entry(Struct, forbid_unknown_fields=True):
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    groups: list[Group] = msgspec.field(default_factory=lambda: list(Group))
    requests_per_second: Annotated[float, Meta(ge=0, le=1_000_000)] | None = None
    burst: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    max_in_flight: Count | None = None
    max_in_flight_bytes: Count | None = None

    def limits(self, usual: Limits) -> Limits | None:
        """Return the limits of the caller; those that it leaves out are the usual ones."""
        own = {name: getattr(self, name) for name in Limits._fields}
        limits = usual._replace(**{name: own[name] for name in own if own[name] is not None})
        return limits if limits.are_set else None


class _KeysFile(Struct, forbid_unknown_fields=True):
    callers: dict[Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")], _Entry]
    public: list[Group] = msgspec.field(default_factory=lambda: [Group.HEALTH])


class _Login(NamedTuple):
    caller: Caller
    groups: frozenset[Group]


class _Keys(NamedTuple):
    public: frozenset[Group]
    logins: dict[str, _Login]
    """By the SHA-256 of their keys."""


Keys: TypeAlias = Watched[_Keys]


class Callers:
    """Decides who calls, whether the caller may, and which limits it has.

    Args:
        settings: `gateway.keys_file` and the limits of callers.
        check_interval_s: between two looks at the file.

    Raises:
        ConfigurationError: the file cannot be used.
    """

    def __init__(self, settings: GatewaySettings, check_interval_s: float) -> None:
        self._limits = Limits(
            settings.caller_requests_per_second,
            settings.caller_burst,
            settings.caller_max_in_flight,
            settings.caller_max_in_flight_bytes,
        )
        self._keys: Keys | None = None
        if settings.keys_file is not None:
            file = settings.keys_file
            self._keys = Watched([file], partial(_load, file, self._limits), check_interval_s)

    @property
    def are_all_alike(self) -> bool:
        """Return True if anybody may call everything, without limits of its own."""
        return self._keys is None and not self._limits.are_set

    def admit(self, group: Group, given: Credentials) -> Caller:
        """Return the caller.

        Args:
            group: of the method.
            given: by the call.

        Raises:
            Denied: the caller sends no key or an unknown one, and the group is not public; or its
                key does not open the group.
        """
        if self._keys is None:
            return self._without_login(given)
        keys = self._keys.current()
        key = given.key
        if not key and given.authorization[: len(BEARER)].lower() == BEARER:
            key = given.authorization[len(BEARER) :].strip()
        login = None
        if key:
            login = keys.logins.get(hashlib.sha256(key.encode("utf-8", "replace")).hexdigest())
        if login is not None and group in login.groups:
            return login.caller
        if group in keys.public:
            return self._without_login(given)
        if login is not None:
            raise Denied(f"the key of {login.caller.tenant} does not open {group}", is_known=True)
        got = "one that is not known" if key else "none"
        expected = "expected an API key in Authorization: Bearer or in X-API-Key"
        raise Denied(f"{group}: {expected}, got {got}", is_known=False)

    def _without_login(self, given: Credentials) -> Caller:
        if not self._limits.are_set:
            return Caller()
        return Caller(limited_as=f"address {_network_of(given.address)}", limits=self._limits)


def _network_of(address: str) -> str:
    """Return what an address is counted by.

    A host has a whole /64 of IPv6 (RFC 7934), so its addresses count together. An IPv4 address is
    the same one in a socket for both versions (`::ffff:192.0.2.1`).
    """
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found.packed[:8] + bytes(8), 64)))


def _load(file: Path, usual: Limits) -> _Keys:
    content = read_file("keys_file", file)
    try:
        found = msgspec.toml.decode(content, type=_KeysFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigurationError(
            f"gateway.keys_file: {file}: expected [callers.NAME] with sha256 and groups: {error}"
        ) from error
    logins: dict[str, _Login] = {}
    for name, entry in found.callers.items():
        if entry.sha256 in logins:
            other = logins[entry.sha256].caller.tenant
            raise ConfigurationError(
                f"gateway.keys_file: {file}: expected a key of its own for each caller, "
                f"{name} has that of {other}"
            )
        caller = Caller(name, f"caller {name}", entry.limits(usual))
        logins[entry.sha256] = _Login(caller, frozenset(entry.groups))
    return _Keys(frozenset(found.public), logins)
