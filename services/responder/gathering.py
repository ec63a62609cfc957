"""How long the next transaction waits for more answers: a pure rule.

A transaction costs about as much whether it has one answer or a thousand: some milliseconds of
processor time, most of it the broker's. While many requests wait in the process, those that will be
answered soon go together. None waits a tenth longer for it than it would have.
"""

from __future__ import annotations

SHARE = 0.1
"""Of the time that the requests under way take to be answered."""
ENOUGH_ANSWERS = 1024
"""With so many the transaction costs little beside its answers."""
MAX_PAUSE_S = 0.1
MIN_PAUSE_S = 0.005
"""With less under way there is no backlog."""


def pause_s(answers: int, elapsed_s: float, under_way: int) -> float:
    """The time to let pass after a transaction, in seconds.

    Args:
        answers: those of the transaction.
        elapsed_s: from the end of the transaction before it to its own.
        under_way: requests of its partition that were read and are not answered.
    """
    if answers <= 0 or elapsed_s <= 0.0:
        return 0.0
    each_s = elapsed_s / answers
    found_s = min(SHARE * under_way * each_s, ENOUGH_ANSWERS * each_s, MAX_PAUSE_S)
    return found_s if found_s >= MIN_PAUSE_S else 0.0
