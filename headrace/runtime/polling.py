"""Look at the repository of models every so often: with `models.mode = "poll"` always, and with
`"all"` after a store was unavailable.
"""

from __future__ import annotations

from typing import Protocol

import structlog

from headrace.errors import ConfigurationError
from headrace.models.registry import Reloaded
from headrace.primitives.backoff import Backoff, Pauses
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)


class PolledModels(Protocol):
    """The part of `headrace.models.registry.Models` that is used here."""

    @property
    def outages(self) -> tuple[str, ...]: ...
    async def reload(self, *, retry: bool = True) -> Reloaded: ...


class RepositoryPoller:
    """Reads the repository again and again, and logs what is new about it, each thing once.

    While the repository is unavailable, the models stay as they are.

    Args:
        models: of this process.
        interval_s: time from the end of one reading to the next, before jitter.
        after_outage: read only while the last reading has met a store that was unavailable, so that
            what could not be downloaded then is served in the end.
    """

    def __init__(
        self, models: PolledModels, interval_s: float, *, after_outage: bool = False
    ) -> None:
        self._models = models
        self._after_outage = after_outage
        # With jitter, so that the processes of a deployment do not ask a store all at once.
        self._pauses = Pauses(Backoff(interval_s, interval_s))
        self._outages: tuple[str, ...] = ()
        self._faults: tuple[str, ...] = ()
        self._failed = ""

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self._pauses.sleep()
            if self._models.outages or not self._after_outage:
                await self.poll()

    async def poll(self) -> None:
        """Read the repository once; versions that failed wait until their files change."""
        try:
            reloaded = await self._models.reload(retry=False)
        except ConfigurationError as error:
            if str(error) != self._failed:
                log.error(Event.MODELS_RELOAD_FAILED, reason=str(error))
            self._failed = str(error)
            return
        for reason in set(reloaded.outages).difference(self._outages):
            log.warning(Event.STORE_UNAVAILABLE, reason=reason)
        for name in reloaded.emptied:
            log.warning(Event.REPOSITORY_EMPTIED, repository=name)
        has_changed = bool(reloaded.added or reloaded.changed or reloaded.removed)
        if has_changed or reloaded.faults != self._faults:
            log.info(Event.MODELS_RELOADED, **reloaded._asdict())
        self._outages, self._faults, self._failed = reloaded.outages, reloaded.faults, ""
