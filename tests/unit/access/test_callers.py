"""Who a caller is, by what its call shows."""

from __future__ import annotations

import pytest

from headrace.access.callers import ApiGroup, Callers, Credentials
from headrace.access.limits import Limits
from headrace.config import GatewaySettings
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
