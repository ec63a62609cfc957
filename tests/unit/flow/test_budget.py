"""Shares of the byte budget that one model, or one tenant, may hold."""

from __future__ import annotations

from headrace.delivery.budget import Budget, BudgetShares, Share
from headrace.tuning import TUNING


class BudgetHarness:
    """A budget of 1,200 bytes, with requests of 100 bytes."""

    def __init__(self, model_share: float = 0.5, tenant_share: float = 1.0) -> None:
        self.budget = Budget(1200)
        self.shares = BudgetShares(self.budget, model_share, tenant_share)

    def fill(self, share: Share) -> int:
        """Take as much as a share may; returns how many bytes it took."""
        taken = 0
        while self.shares.has_room(share, 100, uncharged_bytes=100):
            share.charge(100)
            self.budget.used_bytes += 100
            taken += 100
        return taken


def test_single_model_gets_its_share_of_budget() -> None:
    """Half of the budget stays free for others."""
    bench = BudgetHarness()

    assert bench.fill(bench.shares.share("a", "")) == 600


def test_second_model_gets_share_of_free_budget() -> None:
    """The share leaves as much room to further models as it takes."""
    bench = BudgetHarness()
    bench.fill(bench.shares.share("a", ""))

    assert bench.fill(bench.shares.share("b", "")) == 300


def test_share_of_one_is_whole_budget() -> None:
    """A share of 1 limits nothing: the budget itself pauses reading."""
    bench = BudgetHarness(model_share=1)
    share = bench.shares.share("a", "")
    bench.budget.used_bytes = share.model.used_bytes = 1200

    assert bench.shares.has_room(share, 100, uncharged_bytes=100)


def test_request_larger_than_share_is_admitted_alone() -> None:
    """It would never run otherwise."""
    bench = BudgetHarness()

    assert bench.shares.has_room(bench.shares.share("a", ""), 1100, uncharged_bytes=1100)


def test_tenant_share_counts_all_its_models() -> None:
    """One tenant's requests to many models leave room for others; requests without one too."""
    bench = BudgetHarness(model_share=1, tenant_share=0.5)
    taken = sum(bench.fill(bench.shares.share(model, "loud")) for model in ("a", "b", "c"))

    assert taken == 600
    assert bench.fill(bench.shares.share("a", "quiet")) == 300


def test_idle_claims_are_forgotten() -> None:
    """Callers may name any number of tenants; what is in use stays."""
    bench = BudgetHarness(tenant_share=0.5)
    used = bench.shares.share("a", "used")
    used.charge(100)
    for number in range(2 * TUNING.delivery.max_idle_shares):
        bench.shares.share(f"model {number}", f"tenant {number}")

    assert bench.shares.share("a", "used") is used
    assert len(bench.shares.model_bytes()) <= TUNING.delivery.max_idle_shares + 2
