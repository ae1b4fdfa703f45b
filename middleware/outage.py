"""A server that is away is said once when it goes and once when it is back."""

from __future__ import annotations

import logging
from threading import Lock
from time import monotonic

logger = logging.getLogger("onetake")


class Outage:
    """The absence of one server, as seen by all threads of this process."""

    def __init__(self, server: str, meanwhile: str) -> None:
        """`server`: its name. `meanwhile`: what happens until it is back; both for the log."""
        self._server = server
        self._meanwhile = meanwhile
        self._since_s: float | None = None
        self._lock = Lock()

    @property
    def lasts(self) -> bool:
        """Whether the server is away, as far as this process knows."""
        return self._since_s is not None

    def begins(self, error: BaseException) -> None:
        """The server did not do what was asked; `error` says why."""
        with self._lock:
            if self._since_s is None:
                self._since_s = monotonic()
                reason = " ".join(str(error).split()) or type(error).__name__
                logger.warning("%s cannot be used: %s. %s", self._server, reason, self._meanwhile)

    def ends(self) -> None:
        """The server did what was asked. Costs nothing while it always does."""
        if self._since_s is None:
            return
        with self._lock:
            if self._since_s is not None:
                seconds = monotonic() - self._since_s
                self._since_s = None
                logger.info("%s can be used again after %.1f s.", self._server, seconds)
