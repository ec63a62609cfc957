"""The byte budget of a process, and the shares of it that one model, or one tenant, may hold.

The limit of a share moves with what is free, as in switches whose queues have one memory ("dynamic
thresholds": Choudhury and Hahne, 1998). With a share of a half, a model may hold as much as is
free: alone it gets half of the budget; two that want all they can get have a third each, and a
third is still free for others. So one that is saturated leaves room at any time, and no part of
the budget is set aside for models that have nothing to do.
"""

from __future__ import annotations

import math

from headrace.tuning import TUNING


class Budget:
    """A limit in bytes with hysteresis.

    Args:
        limit_bytes: the limit.
        resume_fraction: part of the limit below which it no longer counts as exceeded.

    Attributes:
        acked: number of answered records.
    """

    __slots__ = ("_exceeded", "_resume_bytes", "acked", "limit_bytes", "used_bytes")

    def __init__(
        self, limit_bytes: int, resume_fraction: float = TUNING.delivery.resume_fraction
    ) -> None:
        self._resume_bytes = limit_bytes * resume_fraction
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.acked = 0
        self._exceeded = False

    @property
    def is_exceeded(self) -> bool:
        """True from the moment the limit is reached until use has fallen well below it."""
        if self._exceeded:
            self._exceeded = self.used_bytes > self._resume_bytes
        else:
            self._exceeded = self.used_bytes >= self.limit_bytes
        return self._exceeded


class Usage:
    """The bytes that one model, or one tenant, holds of a budget."""

    __slots__ = ("used_bytes",)

    def __init__(self) -> None:
        self.used_bytes = 0


class Share:
    """Share of a budget: the bytes that one model holds for one tenant.

    Args:
        model: usage of the model, for all tenants.
        tenant: usage of the tenant, for all models; None where requests name no tenant.

    Attributes:
        used_bytes: bytes held.
        deferred_records: number of its requests left in the log.
        deferred_s: time of the last deferral, on the monotonic clock.
    """

    __slots__ = ("deferred_records", "deferred_s", "model", "tenant", "used_bytes")

    def __init__(self, model: Usage, tenant: Usage | None) -> None:
        self.model = model
        self.tenant = tenant
        self.used_bytes = 0
        self.deferred_records = 0
        self.deferred_s = -math.inf

    def charge(self, size_bytes: int) -> None:
        """Take bytes; a negative number releases them."""
        self.used_bytes += size_bytes
        self.model.used_bytes += size_bytes
        if self.tenant is not None:
            self.tenant.used_bytes += size_bytes


class BudgetShares:
    """Shares of one budget, by model and tenant.

    Args:
        budget: the budget that is shared.
        model_share: the part of it that one model may hold while no other holds anything; 1 is
            no limit.
        tenant_share: likewise, for one tenant. Requests that name none have no such limit.
        max_idle_shares: most remembered shares that hold nothing.
    """

    def __init__(
        self,
        budget: Budget,
        model_share: float,
        tenant_share: float,
        max_idle_shares: int = TUNING.delivery.max_idle_shares,
    ) -> None:
        self._budget = budget
        self._model_weight = _weight(model_share)
        self._tenant_weight = _weight(tenant_share)
        self._shares: dict[tuple[str, str], Share] = {}
        self._models: dict[str, Usage] = {}
        self._tenants: dict[str, Usage] = {}
        self._max_idle_shares = self._forget_at = max_idle_shares

    @property
    def limit_bytes(self) -> int:
        """The whole budget."""
        return self._budget.limit_bytes

    def share(self, model: str, tenant: str) -> Share:
        """Return the share of a model and a tenant."""
        share = self._shares.get((model, tenant))
        if share is None:
            if len(self._shares) >= self._forget_at:
                self._forget_idle()
            of_model = self._models.setdefault(model, Usage())
            of_tenant = self._tenants.setdefault(tenant, Usage()) if tenant else None
            share = self._shares[model, tenant] = Share(of_model, of_tenant)
        return share

    def has_room(self, share: Share, size_bytes: int, uncharged_bytes: int = 0) -> bool:
        """Return True if a share may take `size_bytes` more; one that holds nothing always may.

        Args:
            share: share of a model and a tenant.
            size_bytes: number of bytes to take.
            uncharged_bytes: number of these bytes that the budget does not count yet.
        """
        budget, tenant = self._budget, share.tenant
        free_bytes = budget.limit_bytes - budget.used_bytes - uncharged_bytes
        used_bytes = share.model.used_bytes
        if used_bytes and used_bytes + size_bytes > _limit_bytes(self._model_weight, free_bytes):
            return False
        if tenant is None or not tenant.used_bytes:
            return True
        return tenant.used_bytes + size_bytes <= _limit_bytes(self._tenant_weight, free_bytes)

    def room(self, share: Share) -> float:
        """Return how many bytes `has_room` lets a share take in any case, in one or more parts; a
        share that holds nothing may take more. Negative if the share holds more than it may.
        """
        budget, tenant = self._budget, share.tenant
        free_bytes = budget.limit_bytes - budget.used_bytes
        room = _limit_bytes(self._model_weight, free_bytes) - share.model.used_bytes
        if tenant is None:
            return room
        return min(room, _limit_bytes(self._tenant_weight, free_bytes) - tenant.used_bytes)

    def model_bytes(self) -> dict[str, int]:
        """Return what each model holds now."""
        return {model: usage.used_bytes for model, usage in self._models.items()}

    def _forget_idle(self) -> None:
        used = {
            name: share
            for name, share in self._shares.items()
            if share.used_bytes or share.deferred_records
        }
        self._shares = used
        self._models = {model: share.model for (model, _), share in used.items()}
        self._tenants = {
            tenant: share.tenant for (_, tenant), share in used.items() if share.tenant is not None
        }
        self._forget_at = 2 * len(used) + self._max_idle_shares


def _weight(share: float) -> float:
    """Return by how much a limit exceeds what is free, so that it is the share when alone."""
    return math.inf if share >= 1 else share / (1 - share)


def _limit_bytes(weight: float, free_bytes: int) -> float:
    """Return a share's limit: without one even where less than nothing is free."""
    return weight if weight == math.inf else weight * free_bytes
