"""Transaction linger: how long the next transaction waits for more answers. A pure rule.

A transaction costs some milliseconds of processor time, most of it the broker's, for one answer
or a thousand. While many requests are in flight, answers that end soon share a transaction. This
lengthens the wait of each request by less than a tenth.
"""

from __future__ import annotations

SHARE = 0.1
"""Longest pause, as a share of the time that the requests in flight take to be answered."""
ENOUGH_ANSWERS = 1024
"""With this many answers, the cost of the transaction itself is small."""
MAX_PAUSE_S = 0.1
MIN_PAUSE_S = 0.005
"""A shorter pause means that there is no backlog, so there is none."""


def pause_s(answers: int, elapsed_s: float, under_way: int) -> float:
    """Return the pause after a transaction, in seconds; 0 without a backlog.

    Args:
        answers: number of answers in the transaction.
        elapsed_s: time from the end of the previous transaction to the end of this one.
        under_way: requests of its partition that were read and are not answered.
    """
    if answers <= 0 or elapsed_s <= 0.0:
        return 0.0
    each_s = elapsed_s / answers
    found_s = min(SHARE * under_way * each_s, ENOUGH_ANSWERS * each_s, MAX_PAUSE_S)
    return found_s if found_s >= MIN_PAUSE_S else 0.0
