"""The broker of a relay that runs beside a stage: `python -m middleware relay --broker tests.relay_broker`.

It knows neither actors nor queues: a relay needs none of them.
"""

from __future__ import annotations

import os

import dramatiq

from middleware import Database, DurableRedisBroker, IdempotentConsumer, tables

database = Database(os.environ["DATABASE_URL"])
models = tables.on(database)
broker = DurableRedisBroker(
    url=os.environ["REDIS_URL"],
    namespace="stage",
    ledger=models,
    redis_window=int(os.environ.get("REDIS_WINDOW", "10000")),
    middleware=[],
)
broker.add_middleware(IdempotentConsumer(models.ProcessedMessage))
dramatiq.set_broker(broker)
