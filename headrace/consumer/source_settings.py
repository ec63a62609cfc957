"""What a source reads and how, as its segment says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """What a source reads and how.

    Attributes:
        group: the consumer group of the membership.
        progress_group: whose committed offsets say where to start; ours, except for an ingest
            without its responder.
        commits: whether acknowledged work is committed here.
        kind: members of the group that are of another kind are kept out.
        requests: the topic whose progress is kept here; the one that is read, unless results are.
        exactly_once: answers are sealed with what they commit.
        shares: each partition gets but its share of the budget.
        chains_keys: each request is told which one with the same key goes before it.
        kept_s: how long what is passed on is kept, where another process answers.
        model_share, tenant_share: what one model, or one tenant, may hold of the budget while no
            other holds anything; see `headrace.delivery.budget.FairQueue`. 1 is no limit.
        max_attempts: so many ends while it ran alone condemn a record; 0 suspects none.
        runs: models run in this process, of what is read here.
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
