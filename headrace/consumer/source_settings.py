"""Settings of a source, derived from its stage group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of a source.

    Attributes:
        group: the consumer group of the membership.
        progress_group: group whose commits determine the start offsets; the same as `group`, except
            for an ingest without its responder.
        commits: True if acknowledged offsets are committed here.
        kind: kind of member; members of another kind are kept out of the group.
        requests: the topic of requests, if it is read here, or its progress is kept here; empty
            otherwise.
        exactly_once: answers and offsets are committed in one transaction.
        shares: each partition may hold only an equal share of the budget.
        chains_keys: each request gets the offset of its predecessor with the same key.
        kept_s: retention of the records passed on, if another process answers.
        model_share, tenant_share: part of the budget that one model, or one tenant, may hold while
            no other holds anything; see `headrace.delivery.budget.BudgetShares`. 1 is no limit.
        max_attempts: unclean ends while running alone after which a record counts as poisoned; 0
            disables isolation.
        runs: True if models run in this process, on the records read here.
    """

    topic: str
    group: str
    progress_group: str
    commits: bool
    budget_bytes: int
    drain_timeout_s: float
    kind: str = ""
    requests: str = ""
    exactly_once: bool = False
    shares: bool = False
    chains_keys: bool = False
    model_share: float = 1.0
    tenant_share: float = 1.0
    max_attempts: int = 0
    runs: bool = False
    kept_s: float = 0.0
