"""What the demo's workers run: the application's actors, and a count of what happens to them."""

from __future__ import annotations

import os
from typing import Any

from dramatiq import Broker, MessageProxy, Middleware

import settings
from actors import broker
from middleware.delivery import current

#: A hash in Redis: `started:GROUP` and `ended:GROUP`, deliveries by the process group of their
#: worker, and `duplicates`, those that were answered.
COUNTS = f"{settings.REDIS_NAMESPACE}:demo"


class Counting(Middleware):
    """Counts deliveries before they are acknowledged, so that none is missed if we are killed."""

    def before_process_message(self, _broker: Broker, _message: MessageProxy) -> None:
        """A delivery begins."""
        broker.client.hincrby(COUNTS, f"started:{os.getpgrp()}", 1)

    def after_process_message(
        self,
        _broker: Broker,
        _message: MessageProxy,
        *,
        result: Any = None,  # noqa: ARG002 - Dramatiq names its arguments
        exception: BaseException | None = None,
    ) -> None:
        """A delivery has ended; its transaction is committed or rolled back."""
        if exception is None and current.redelivered:
            broker.client.hincrby(COUNTS, "duplicates", 1)
        broker.client.hincrby(COUNTS, f"ended:{os.getpgrp()}", 1)


broker.add_middleware(Counting())
