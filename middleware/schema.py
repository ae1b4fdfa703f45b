"""Makes the tables of an application that has no migrations of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inbox import table_of
from .tables import DEAD_LETTER_INDEXES, INBOX_INDEXES, OUTBOX_INDEXES

if TYPE_CHECKING:
    import peewee

    from .broker import DurableRedisBroker

#: Which advisory lock means "somebody makes Onetake's tables".
LOCK = 0x6F6E6574616B65

#: Columns that were added after the first release; older tables get them.
ADDED_COLUMNS = {"parent_id": "text", "sent_at": "timestamptz"}


def migrate(broker: DurableRedisBroker) -> list[str]:
    """Make what is missing of the tables of a broker; any number may do it at once (T26).

    Returns:
      The names of the tables that were looked after.
    """
    inbox, ledger = broker.guard.inbox.model, broker.ledger
    models: list[type[peewee.Model]] = [inbox]
    indexes: list[tuple[type[peewee.Model], dict[str, str]]] = [(inbox, INBOX_INDEXES)]
    statements: list[str] = []
    if ledger is not None:
        models += [
            ledger.outbox,
            ledger.dead_letters,
            ledger.barriers,
            ledger.barrier_members,
            ledger.ticks,
        ]
        indexes += [(ledger.outbox, OUTBOX_INDEXES), (ledger.dead_letters, DEAD_LETTER_INDEXES)]
        statements.append(ledger.vacuum_early)
    database = broker.guard.database
    with database.atomic():
        database.execute_sql(
            "SELECT set_config('lock_timeout', '0', true), pg_advisory_xact_lock(%s)",
            (LOCK,),
        )
        for model in models:
            model.create_table(safe=True)
            for name in ADDED_COLUMNS.keys() & model._meta.fields.keys():
                database.execute_sql(
                    f"ALTER TABLE {table_of(model)} ADD COLUMN IF NOT EXISTS {name} {ADDED_COLUMNS[name]}"
                )
        for statement in [*statements, *_index_statements(indexes)]:
            database.execute_sql(statement)
    return [model._meta.table_name for model in models]


def _index_statements(indexes: list[tuple[type[peewee.Model], dict[str, str]]]) -> list[str]:
    return [
        f'CREATE INDEX IF NOT EXISTS "{model._meta.table_name}_{short}" ON {table_of(model)} {definition}'
        for model, definitions in indexes
        for short, definition in definitions.items()
    ]
