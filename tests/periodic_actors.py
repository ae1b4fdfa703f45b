"""A periodic actor beside a stage, for worker processes: `dramatiq tests.periodic_actors`."""

from __future__ import annotations

import os

import dramatiq

from middleware import Database, DurableRedisBroker, IdempotentConsumer, tables

database = Database(os.environ["DATABASE_URL"])
models = tables.on(database)
broker = DurableRedisBroker(url=os.environ["REDIS_URL"], namespace="stage", ledger=models)
broker.add_middleware(IdempotentConsumer(models.ProcessedMessage))
dramatiq.set_broker(broker)


@dramatiq.actor(periodic="0 0 * * *", timezone="Europe/Berlin")
def report() -> None:
    database.execute_sql("INSERT INTO effects VALUES ('reported')")
