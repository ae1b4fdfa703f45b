"""Makes the tables of an application that has no migrations of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .ledger import index_statements

if TYPE_CHECKING:
    from .broker import DurableRedisBroker

#: Which advisory lock means "somebody makes Onetake's tables".
LOCK = 0x6F6E6574616B65


def migrate(broker: DurableRedisBroker) -> list[str]:
    """Make what is missing of the tables of a broker; any number may do it at once (T26).

    Returns:
      The names of the tables that were looked after.
    """
    models = [broker.guard.inbox.model]
    statements: list[str] = []
    if broker.ledger is not None:
        models += [broker.ledger.outbox, broker.ledger.dead_letters]
        statements = [*index_statements(broker.ledger), broker.ledger.vacuum_early]
    database = broker.guard.database
    with database.atomic():
        database.execute_sql(
            "SELECT set_config('lock_timeout', '0', true), pg_advisory_xact_lock(%s)",
            (LOCK,),
        )
        for model in models:
            model.create_table(safe=True)
        for statement in statements:
            database.execute_sql(statement)
    return [model._meta.table_name for model in models]
