"""Identification of callers by the credentials of their calls."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from headrace.access.callers import ApiGroup, Callers, Credentials, Denied
from headrace.access.limits import Limits
from headrace.config import GatewaySettings, TelemetrySettings
from headrace.errors import ConfigurationError
from headrace.tuning import TUNING


@pytest.mark.parametrize(
    ("address", "counted_by"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_caller_without_login_is_counted_by_its_network(address: str, counted_by: str) -> None:
    """A host has all addresses of a /64, so that they are one caller."""
    callers = Callers(GatewaySettings(), TUNING.gateway.access, Limits(max_in_flight=1))

    caller = callers.admit(ApiGroup.INFERENCE, Credentials(address=address))

    assert (caller.limited_as, caller.tenant) == (f"address {counted_by}", "")


def test_without_keys_and_limits_all_callers_are_alike() -> None:
    """The doors then ask nothing of a call."""
    assert Callers(GatewaySettings(), TUNING.gateway.access).are_all_alike


def limited_by(directory: Path, entry: str, usual: Limits | None) -> Limits | None:
    """Return the limits of a caller with such an entry in the file of keys."""
    file = directory / "keys.toml"
    file.write_text(f'[callers.ada]\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n{entry}')
    settings = GatewaySettings.model_validate({"keys_file": file})
    callers = Callers(settings, TUNING.gateway.access, usual)
    return callers.admit(ApiGroup.INFERENCE, Credentials(key="secret")).limits


@pytest.mark.parametrize(
    ("entry", "usual"),
    [
        ("burst = 5", Limits()),
        ("burst = 5\nmax_in_flight = 3", Limits()),
        ("burst = 5\nrequests_per_second = 0", Limits(requests_per_second=1.0)),
    ],
)
def test_burst_of_key_without_any_rate_is_refused(
    tmp_path: Path, entry: str, usual: Limits
) -> None:
    """It limits nothing, and whoever wrote it believes that it does."""
    with pytest.raises(ConfigurationError, match="ada: expected requests_per_second beside burst"):
        limited_by(tmp_path, entry, usual)


def test_burst_of_key_beside_usual_rate_is_taken(tmp_path: Path) -> None:
    """The rate may be that of all callers."""
    usual = Limits(requests_per_second=1.0)
    assert limited_by(tmp_path, "burst = 5", usual) == Limits(requests_per_second=1.0, burst=5)


def test_burst_of_key_is_ignored_where_limits_have_no_effect(tmp_path: Path) -> None:
    """The file may be that of a gateway, whose settings have the rate."""
    assert limited_by(tmp_path, "burst = 5", usual=None) is None


# --- changes of models --------------------------------------------------------------------------

LOGIN = Credentials(key="secret")


def callers_with(directory: Path, changes: str, *, keys: bool) -> Callers:
    """Callers for whom *repository* is public: one with a login that names it, one with a login of
    another group, and one whose login opens all groups without naming any.

    Without keys there are no logins.
    """
    file = directory / "keys.toml"
    keys_of = (b"secret", b"other", b"all")
    ada, bob, eve = (hashlib.sha256(key).hexdigest() for key in keys_of)
    file.write_text(
        f'public = ["repository"]\n[callers.ada]\nsha256 = "{ada}"\ngroups = ["repository"]\n'
        f'[callers.bob]\nsha256 = "{bob}"\ngroups = ["inference"]\n'
        f'[callers.eve]\nsha256 = "{eve}"\n'
    )
    settings = {"keys_file": file if keys else None, "model_changes": changes}
    return Callers(GatewaySettings.model_validate(settings), TUNING.gateway.access)


@pytest.mark.parametrize(
    ("changes", "keys", "given", "tenant"),
    [
        ("login", True, LOGIN, "ada"),
        ("anyone", True, LOGIN, "ada"),
        ("anyone", True, Credentials(), ""),
        ("anyone", False, Credentials(), ""),
    ],
)
def test_change_is_allowed_to_logins_or_where_setting_says_so(
    tmp_path: Path, changes: str, keys: bool, given: Credentials, tenant: str
) -> None:
    """With "anyone" whoever may see the index may change it."""
    assert callers_with(tmp_path, changes, keys=keys).admit_change(given).tenant == tenant


@pytest.mark.parametrize(
    ("changes", "keys", "given", "told"),
    [
        ("login", True, Credentials(), "expected an API key"),
        ("login", True, Credentials(key="unknown"), "got one that is not known"),
        (
            "login",
            True,
            Credentials(key="other"),
            "expected a login that opens it, got that of bob",
        ),
        (
            "login",
            True,
            Credentials(key="all"),
            "repository: expected a login whose groups name it (gateway.keys_file) for changes of "
            "models, got that of eve, which names no groups",
        ),
        ("login", False, Credentials(), 'gateway.jwt), or gateway.model_changes = "anyone"'),
        ("off", True, LOGIN, "expected gateway.model_changes other than off"),
        ("off", False, Credentials(), "expected gateway.model_changes other than off"),
    ],
)
def test_change_is_refused_with_what_it_needs(
    tmp_path: Path, changes: str, keys: bool, given: Credentials, told: str
) -> None:
    """A group that is public opens the index alone, and so does a login without groups."""
    with pytest.raises(Denied, match=re.escape(told)):
        callers_with(tmp_path, changes, keys=keys).admit_change(given)


@pytest.mark.parametrize("group", ApiGroup)
def test_login_without_groups_opens_all_groups_for_reading(tmp_path: Path, group: ApiGroup) -> None:
    """Changes of models are all that it does not open."""
    callers = callers_with(tmp_path, "login", keys=True)
    assert callers.admit(group, Credentials(key="all")).tenant == "eve"


def test_any_certificate_opens_no_changes_of_models(tmp_path: Path) -> None:
    """Without a file of keys an authority vouches for who calls, and not for what it may change."""
    (tmp_path / "ca.pem").touch()
    settings = TelemetrySettings.model_validate({"tls_client_ca_file": tmp_path / "ca.pem"})
    callers = Callers(settings, TUNING.gateway.access, trust_certificates=True)
    given = Credentials(certificate=("CN=ada",))
    assert callers.admit(ApiGroup.REPOSITORY, given).tenant == ""
    with pytest.raises(Denied, match=r"telemetry\.keys_file.* got that of any certificate"):
        callers.admit_change(given)
