"""The composition root: the broker of this application and what stands in its stack.

Importing it connects to nothing; producers and workers alike get their broker from here.
"""

from __future__ import annotations

import dramatiq
from dramatiq.middleware import CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

import settings
from middleware import DurableRedisBroker, IdempotentConsumer
from middleware.broker import connect
from models import Barrier, BarrierMember, DeadLetter, OutboxMessage, ProcessedMessage, Tick

broker = DurableRedisBroker(
    url=settings.REDIS_URL,
    namespace=settings.REDIS_NAMESPACE,
    heartbeat_timeout=settings.HEARTBEAT_TIMEOUT_MS,
    ledger=(OutboxMessage, DeadLetter, Barrier, BarrierMember, Tick),
    redis_window=settings.REDIS_WINDOW,
    max_message_bytes=settings.MAX_MESSAGE_BYTES,
)

# The broker begins with Dramatiq's default stack, and the guarantee depends on no position in it:
# IdempotentConsumer lays its transaction around the actor's function. It is added first all the
# same, so that it has refused an unfit actor before anything else takes notice of it.
broker.add_middleware(IdempotentConsumer(ProcessedMessage))

# Lets a body read the options of its message, such as a periodic actor's tick.
broker.add_middleware(CurrentMessage())

# Results stores a result after the transaction has ended, wherever it stands. It shares the
# namespace: all that this application has in Redis is found under one prefix. Its client waits
# longer than the broker's: `get_result(block=True)` does so for 10 seconds.
RESULT_TIMEOUT_S = 12.0
broker.add_middleware(
    Results(
        backend=RedisBackend(
            client=connect(settings.REDIS_URL, RESULT_TIMEOUT_S) if settings.REDIS_URL else broker.client,
            namespace=f"{settings.REDIS_NAMESPACE}:results",
            use_namespace_prefix_keys=True,
        )
    )
)

dramatiq.set_broker(broker)
