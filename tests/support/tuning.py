"""Tuning values for tests: retries and background checks follow at once."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S

EAGER = replace(
    TUNING,
    executor=replace(TUNING.executor, trial_niceness=0),
    models=replace(TUNING.models, reader_niceness=0),
)
"""Children that load models go as fast as the test that waits for them; the rest as by default."""

QUICK = replace(
    EAGER,
    responder=replace(TUNING.responder, transaction_retry_s=0.01, reply_topic_retry_s=0.01),
    consumer=replace(
        TUNING.consumer,
        poll_timeout_s=0.02,
        retry_first_s=0.01,
        retry_max_s=0.01,
        other_progress_interval_s=0.001,
        stalled_check_interval_s=0.02,
        throughput_interval_s=0.01,
        end_offsets_interval_s=0.01,
    ),
    delivery=replace(
        TUNING.delivery,
        commit_interval_s=0.001,
        retry_first_s=0.01,
        retry_max_s=0.01,
        send_retry_first_s=0.002,
        send_retry_max_s=0.002,
        unshared_after_timeout_s=0.05,
        unshared_after_failure_s=0.05,
        unshared_after_delay_s=0.02,
        unshared_after_refusal_s=0.02,
    ),
)
"""Short pauses, and everything else as by default."""

UNHURRIED_EXPORT = replace(
    TUNING.runtime, trace_close_timeout_s=DEADLINE_S, trace_abort_timeout_s=DEADLINE_S
)
"""Closing waits until all spans are sent, however long the machine stands still meanwhile."""
