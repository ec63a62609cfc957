"""Rights and limits of callers: logins by keys, tokens or certificates, the groups of methods
that each login opens, and limits.

A key is a random text that its caller sends with each call; the server's file holds only its
SHA-256. That is enough, because nobody can guess a key of 256 random bits: slow hashes protect
passwords. Looking a hash up tells nothing about the keys that are in the file.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Collection, Iterable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from headrace.access.limits import NO_LIMITS, Limits
from headrace.access.watched import Watched, read_file
from headrace.config import AccessSettings, JwtSettings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.tuning import AccessTuning

if TYPE_CHECKING:
    from headrace.access.tokens import JwtVerifier

BEARER = "bearer "


class ApiGroup(StrEnum):
    """The groups of methods that are opened together, like Triton's restricted protocols.

    Metrics and status are those of the HTTP server of a process, the page included.
    """

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    REPOSITORY = "repository"
    METRICS = "metrics"
    STATUS = "status"


class Denied(Rejected):
    """The caller is not known, or may not call this."""

    def __init__(self, message: str, *, is_known: bool) -> None:
        super().__init__(Code.INVALID_REQUEST, message)
        self.is_known = is_known


class Credentials(NamedTuple):
    """Credentials that came with a call; each is empty if absent.

    Attributes:
        authorization: value of the header `Authorization`.
        key: value of the header `X-API-Key`.
        address: of the other end of the connection, without its port.
        certificate: names in the certificate of the other end, which was verified: those
            for URIs (`URI:spiffe://...`), for hosts (`DNS:...`), and the common names (`CN=...`).
    """

    authorization: str = ""
    key: str = ""
    address: str = ""
    certificate: tuple[str, ...] = ()


def join_values(values: Iterable[str]) -> str:
    """Return the value of a header that was sent any number of times; empty if it was not.

    Different values are joined as RFC 9110 has it (section 5.3), and so are no key that is known,
    and no number: a proxy in front may have looked at another one of them than the server.
    """
    return ", ".join(dict.fromkeys(values))


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
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    certificate: Annotated[str, Meta(pattern="^(URI:|DNS:|CN=).{1,1000}$")] | None = None
    groups: list[ApiGroup] | None = None
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
    public: list[ApiGroup] = msgspec.field(default_factory=lambda: [ApiGroup.HEALTH])


class _Login(NamedTuple):
    """A caller that is known, and the groups that it opens.

    Attributes:
        may_change: it may change which models are served, which a login must say by name.
    """

    caller: Caller
    groups: frozenset[str]
    may_change: bool = False


class _Keys(NamedTuple):
    public: frozenset[ApiGroup]
    logins: dict[str, _Login]
    """Logins by the SHA-256 of their API keys, or by certificate names, which have a prefix."""


Keys: TypeAlias = Watched[_Keys]

_ANY_CERTIFICATE = _Login(Caller(), frozenset(ApiGroup))
_NO_KEYS = _Keys(frozenset({ApiGroup.HEALTH}), {})
_BY_KEY = "an API key in Authorization: Bearer or in X-API-Key"
_BY_CERTIFICATE = "a certificate that is known"
_BY_TOKEN = "a valid token in Authorization: Bearer"  # noqa: S105 - what an error expects


class Callers:
    """Decides who calls, whether the caller may, and which limits it has.

    Args:
        settings: the files of keys and tokens.
        tuning: limits of tokens.
        usual: limits of callers that have none of their own; None where limits have no effect.
        trust_certificates: without a file of keys, a verified certificate opens everything.

    Attributes:
        files: those that are to be refreshed while the callers are in use.
        use_certificates: True if a certificate can be a login.

    Raises:
        ConfigurationError: a file cannot be used, or the packages for tokens are missing.
    """

    def __init__(
        self,
        settings: AccessSettings,
        tuning: AccessTuning,
        usual: Limits | None = None,
        *,
        trust_certificates: bool = False,
    ) -> None:
        self._limits = usual or NO_LIMITS
        self._keys: Keys | None = None
        has_certificates = settings.tls_client_ca_file is not None
        if settings.keys_file is not None:
            load = partial(_load, settings.section, settings.keys_file, usual, has_certificates)
            self._keys = Watched([settings.keys_file], load)
        self._tokens = (
            None if settings.jwt is None else _open_tokens(settings.section, settings.jwt, tuning)
        )
        self._section = settings.section
        self._model_changes = settings.model_changes
        self._trusts_certificates = trust_certificates and has_certificates and self._keys is None
        self.files: list[Watched[Any]] = []
        if self._keys is not None:
            self.files.append(self._keys)
        if self._tokens is not None:
            self.files.append(self._tokens.keys)
        self.use_certificates = has_certificates and (
            self._keys is not None or self._trusts_certificates
        )
        kinds = {
            _BY_KEY: self._keys is not None,
            _BY_TOKEN: self._tokens is not None,
            _BY_CERTIFICATE: self.use_certificates,
        }
        self._expected = " or ".join(kind for kind, is_used in kinds.items() if is_used)

    @property
    def are_all_alike(self) -> bool:
        """Return True if anybody may call everything, without limits of its own."""
        return not self._expected and not self._limits.are_set

    def admit(self, group: ApiGroup, given: Credentials) -> Caller:
        """Return the caller.

        Args:
            group: of the method.
            given: by the call.

        Raises:
            Denied: the group is not public, and the caller has no login, or none that is known, or
                one that does not open the group.
        """
        if not self._expected:
            return self._without_login(given)
        keys = _NO_KEYS if self._keys is None else self._keys.current()
        return self._require_login(group, given, keys.public)

    def _require_login(
        self,
        group: ApiGroup,
        given: Credentials,
        public: Collection[ApiGroup],
        *,
        changes: bool = False,
    ) -> Caller:
        """Return as `admit`, with these groups for callers without a login.

        With `changes` the login has to be one that may change models.
        """
        keys = _NO_KEYS if self._keys is None else self._keys.current()
        login: _Login | None = None
        fault = "none"
        try:
            login = self._log_in(keys, given)
        except Rejected as error:
            fault = error.message
        if login is not None and group in login.groups and (login.may_change or not changes):
            return login.caller
        if group in public:
            return self._without_login(given)
        if login is not None:
            got = f"that of {login.caller.tenant or 'any certificate'}"
            if group in login.groups:
                expected = f"a login whose groups name it ({self._section}.keys_file)"
                got += ", which names no groups"
                raise Denied(
                    f"{group}: expected {expected} for changes of models, got {got}", is_known=True
                )
            raise Denied(f"{group}: expected a login that opens it, got {got}", is_known=True)
        raise Denied(f"{group}: expected {self._expected}, got {fault}", is_known=False)

    def admit_change(self, given: Credentials) -> Caller:
        """Return the caller of a method that changes which models are served.

        Args:
            given: by the call.

        Raises:
            Denied: nobody may; or the caller has no login whose groups name *repository*, though
                one is needed (`model_changes`). One that opens all groups because it names none is
                not enough: it was given for requests.
        """
        group, setting = ApiGroup.REPOSITORY, f"{self._section}.model_changes"
        if self._model_changes == "off":
            expected = f"{setting} other than off for changes of models"
            raise Denied(f"{group}: expected {expected}", is_known=True)
        if self._model_changes == "anyone":
            return self.admit(group, given)
        if not self._expected:
            files = f"{self._section}.keys_file or {self._section}.jwt"
            expected = f'a login ({files}), or {setting} = "anyone"'
            raise Denied(f"{group}: expected {expected} for changes of models", is_known=True)
        return self._require_login(group, given, frozenset(), changes=True)

    def _log_in(self, keys: _Keys, given: Credentials) -> _Login | None:
        """Return the login of a call, None if it shows none.

        Raises:
            Rejected: it is not known; the text completes "got ...".
        """
        bearer = ""
        if given.authorization[: len(BEARER)].lower() == BEARER:
            bearer = given.authorization[len(BEARER) :].strip()
        if not given.key and not bearer:
            return self._log_in_by_certificate(keys, given.certificate)
        for key in (given.key, bearer):  # one of them may be for a proxy in front
            login = keys.logins.get(hashlib.sha256(key.encode("utf-8", "replace")).hexdigest())
            if key and login is not None:
                return login
        if self._tokens is None or not bearer or bearer.count(".") != 2:
            raise Rejected(Code.INVALID_REQUEST, "one that is not known")
        claims = self._tokens.read(bearer)
        limits = self._limits if self._limits.are_set else None
        # Never counted as a key's caller of that name: its limits may be others.
        caller = Caller(claims.tenant, f"token of {claims.tenant}", limits)
        return _Login(caller, claims.groups, ApiGroup.REPOSITORY in claims.groups)

    def _log_in_by_certificate(self, keys: _Keys, names: tuple[str, ...]) -> _Login | None:
        if names and self._trusts_certificates:
            return _ANY_CERTIFICATE
        for name in names:
            if (login := keys.logins.get(name)) is not None:
                return login
        if names:
            raise Rejected(Code.INVALID_REQUEST, "a certificate that is not known")
        return None

    def _without_login(self, given: Credentials) -> Caller:
        if not self._limits.are_set:
            return Caller()
        return Caller(limited_as=f"address {_network_of(given.address)}", limits=self._limits)


def _open_tokens(section: str, settings: JwtSettings, tuning: AccessTuning) -> JwtVerifier:
    try:
        from headrace.access.tokens import JwtVerifier
    except ImportError as error:
        raise ConfigurationError(
            f"{section}.jwt needs PyJWT: pip install 'headrace[jwt]'"
        ) from error
    return JwtVerifier(section, settings, tuning)


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


def _load(section: str, file: Path, usual: Limits | None, has_certificates: bool) -> _Keys:
    content = read_file(f"{section}.keys_file", file)
    where = f"{section}.keys_file: {file}"
    try:
        found = msgspec.toml.decode(content, type=_KeysFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigurationError(
            f"{where}: expected [callers.NAME] with sha256 or certificate, and groups: {error}"
        ) from error
    logins: dict[str, _Login] = {}
    for name, entry in found.callers.items():
        shown = [each for each in (entry.sha256, entry.certificate) if each is not None]
        if len(shown) != 1:
            raise ConfigurationError(
                f"{where}: {name}: expected either sha256 or certificate, got {len(shown)} of them"
            )
        if entry.certificate is not None and not has_certificates:
            raise ConfigurationError(
                f"{where}: {name}: expected {section}.tls_client_ca_file for a certificate, "
                "got none"
            )
        (key,) = shown
        if key in logins:
            other = logins[key].caller.tenant
            raise ConfigurationError(
                f"{where}: expected a key or certificate of its own for each caller, "
                f"{name} has that of {other}"
            )
        limits = entry.limits(usual or NO_LIMITS)
        if usual is not None and entry.burst and not (limits and limits.requests_per_second):
            raise ConfigurationError(
                f"{where}: {name}: expected requests_per_second beside burst, or "
                f"{section}.caller_requests_per_second, without which a burst limits nothing, "
                f"got burst = {entry.burst} alone"
            )
        caller = Caller(name, f"caller {name}", limits)
        logins[key] = _Login(
            caller,
            frozenset(ApiGroup if entry.groups is None else entry.groups),
            ApiGroup.REPOSITORY in (entry.groups or ()),
        )
    return _Keys(frozenset(found.public), logins)
