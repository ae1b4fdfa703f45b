"""How applications on other libraries send a message: each in one transaction of its library.

Each way makes a change of its own ("change"), sends the messages, calls `look` before the end, and
then commits or rolls back.
"""

from __future__ import annotations

import asyncio
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import asyncpg
import psycopg
import psycopg2
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dramatiq import Message

    from .ledger_stage import LedgerStage

CHANGE = "INSERT INTO effects VALUES ('change')"


class ChangeOfMindError(Exception):
    """The application rolls its transaction back."""


class Way(Protocol):
    """A transaction of some library."""

    def __call__(
        self, ledger: LedgerStage, messages: list[Message[Any]], look: Callable[[], object], *, commits: bool
    ) -> None: ...


@cache
def django_orm() -> Any:
    """Django, with a model on the table of effects; it can be configured once in a process."""
    import django
    from django.conf import settings
    from django.db import models

    settings.configure(DATABASES={}, INSTALLED_APPS=[], LOGGING_CONFIG=None, USE_TZ=True)
    django.setup()
    meta = type("Meta", (), {"app_label": "tests", "db_table": "effects", "managed": False})
    fields = {"label": models.TextField(primary_key=True), "Meta": meta, "__module__": __name__}
    return type("Effect", (models.Model,), fields)


def with_django(
    ledger: LedgerStage, messages: list[Message[Any]], look: Callable[[], object], *, commits: bool
) -> None:
    effect: Any = django_orm()
    from django.db import connections, transaction

    connections.settings["default"] = connections.configure_settings(
        {"default": {"ENGINE": "django.db.backends.postgresql", **for_django(ledger.url())}}
    )["default"]
    try:
        with suppress(ChangeOfMindError), transaction.atomic():
            effect.objects.create(label="change")
            for message in messages:
                ledger.broker.enqueue_on(connections["default"], message)
            look()
            if not commits:
                raise ChangeOfMindError
    finally:
        connections["default"].close()
        del connections["default"]


def for_django(url: str) -> dict[str, Any]:
    """A URL of libpq as Django's settings; the service file of libpq would do as well."""
    parameters = psycopg2.extensions.parse_dsn(url)
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    known = {names[name]: value for name, value in parameters.items() if name in names}
    return {**known, "OPTIONS": {k: v for k, v in parameters.items() if k not in names}}


class Base(DeclarativeBase):
    """SQLAlchemy's models."""


class Effect(Base):
    __tablename__ = "effects"
    label: Mapped[str] = mapped_column(primary_key=True)


@contextmanager
def session_on(ledger: LedgerStage, driver: str) -> Iterator[Session]:
    """A session of SQLAlchemy's with one of the drivers that it knows."""
    connect: dict[str, Any] = {"psycopg": psycopg.connect, "psycopg2": psycopg2.connect}
    engine = sqlalchemy.create_engine(
        f"postgresql+{driver}://", creator=lambda: connect[driver](ledger.url())
    )
    with Session(engine) as session:
        yield session
    engine.dispose()


def with_sqlalchemy(
    ledger: LedgerStage,
    messages: list[Message[Any]],
    look: Callable[[], object],
    *,
    commits: bool,
    driver: str,
) -> None:
    with session_on(ledger, driver) as session:
        session.add(Effect(label="change"))
        session.flush()
        for message in messages:
            ledger.broker.enqueue_on(session.connection().connection, message)
        look()
        (session.commit if commits else session.rollback)()


def with_sqlalchemys_statement(
    ledger: LedgerStage, messages: list[Message[Any]], look: Callable[[], object], *, commits: bool
) -> None:
    with session_on(ledger, "psycopg") as session:
        session.add(Effect(label="change"))
        session.flush()
        for message in messages:
            session.connection().exec_driver_sql(*ledger.broker.outbox_statement(message))
        look()
        (session.commit if commits else session.rollback)()


def with_psycopg2(
    ledger: LedgerStage, messages: list[Message[Any]], look: Callable[[], object], *, commits: bool
) -> None:
    with closing(psycopg2.connect(ledger.url())) as connection:
        connection.cursor().execute(CHANGE)
        for message in messages:
            ledger.broker.enqueue_on(connection, message)
        look()
        (connection.commit if commits else connection.rollback)()


def with_psycopg_3(
    ledger: LedgerStage, messages: list[Message[Any]], look: Callable[[], object], *, commits: bool
) -> None:
    with psycopg.connect(ledger.url()) as connection, suppress(ChangeOfMindError), connection.transaction():
        connection.execute(CHANGE)
        for message in messages:
            ledger.broker.enqueue_on(connection, message)
        look()
        if not commits:
            raise ChangeOfMindError


def with_async_psycopg(
    ledger: LedgerStage, messages: list[Message[Any]], look: Callable[[], object], *, commits: bool
) -> None:
    async def play() -> None:
        async with await psycopg.AsyncConnection.connect(ledger.url()) as connection:
            with suppress(ChangeOfMindError):
                async with connection.transaction():
                    await connection.execute(CHANGE)
                    for message in messages:
                        text, values = ledger.broker.outbox_statement(message)
                        await connection.execute(text.encode(), values)
                    look()
                    if not commits:
                        raise ChangeOfMindError

    asyncio.run(play())


def with_asyncpg(
    ledger: LedgerStage, messages: list[Message[Any]], look: Callable[[], object], *, commits: bool
) -> None:
    async def play() -> None:
        connection = await asyncpg.connect(**for_asyncpg(ledger.url()))
        try:
            with suppress(ChangeOfMindError):
                async with connection.transaction():
                    await connection.execute(CHANGE)
                    for message in messages:
                        text, values = ledger.broker.outbox_statement(message, "numeric")
                        await connection.execute(text, *values)
                    look()
                    if not commits:
                        raise ChangeOfMindError
        finally:
            await connection.close()

    asyncio.run(play())


def with_async_sqlalchemy(
    ledger: LedgerStage, messages: list[Message[Any]], look: Callable[[], object], *, commits: bool
) -> None:
    async def play() -> None:
        engine = create_async_engine(
            "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(**for_asyncpg(ledger.url()))
        )
        async with engine.connect() as connection:
            await connection.exec_driver_sql(CHANGE)
            for message in messages:
                text, values = ledger.broker.outbox_statement(message, "numeric")
                await connection.exec_driver_sql(text, values)
            look()
            await (connection.commit if commits else connection.rollback)()
        await engine.dispose()

    asyncio.run(play())


def for_asyncpg(url: str) -> dict[str, Any]:
    """A URL of libpq as asyncpg's arguments: it does not know libpq's `options`."""
    parameters = psycopg2.extensions.parse_dsn(url)
    options = dict(word.split("=") for word in parameters.pop("options").split() if "=" in word)
    names = {"dbname": "database"}
    return {**{names.get(k, k): v for k, v in parameters.items()}, "server_settings": options}


WAYS: dict[str, Way] = {
    "Django's ORM": with_django,
    "SQLAlchemy with psycopg": partial(with_sqlalchemy, driver="psycopg"),
    "SQLAlchemy with psycopg2": partial(with_sqlalchemy, driver="psycopg2"),
    "SQLAlchemy with the statement": with_sqlalchemys_statement,
    "SQLAlchemy with asyncpg": with_async_sqlalchemy,
    "psycopg2": with_psycopg2,
    "psycopg 3": with_psycopg_3,
    "psycopg 3, async": with_async_psycopg,
    "asyncpg": with_asyncpg,
}
