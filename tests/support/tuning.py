"""Tuning values for tests: retries follow soon."""

from __future__ import annotations

from dataclasses import replace

from headrace.tuning import TUNING

QUICK = replace(
    TUNING, responder=replace(TUNING.responder, transaction_retry_s=0.01, reply_topic_retry_s=0.01)
)
"""Retries on the embedded log follow soon."""
