"""What is refused when an actor is declared or a worker boots, with a sentence that says what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import dramatiq
import peewee
import pytest
import redis
from dramatiq.brokers.stub import StubBroker

from embedded import Valkey, temporary_folder
from middleware import Database, DurableRedisBroker, IdempotentConsumer, tables
from middleware.errors import ConfigurationError, OnetakeError

from .servers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .stage import Stage

pytest_plugins = ("tests.stage",)


def guarded() -> StubBroker:
    """A broker that connects to nothing, with the guard on a database that does neither."""

    class ProcessedMessage(tables.ProcessedMessage):
        class Meta:
            database = Database(None)

    broker = StubBroker()
    broker.add_middleware(IdempotentConsumer(ProcessedMessage))
    return broker


def declare(broker: dramatiq.Broker, **options: Any) -> None:
    @dramatiq.actor(broker=broker, **options)
    def pay(amount: int) -> None: ...


def test_an_async_actor_is_refused_t8() -> None:
    # Given an actor whose body would run on another thread
    # When it is declared
    with pytest.raises(ConfigurationError, match=r"'pay' is async.*plain function.*idempotency=\"off\""):

        @dramatiq.actor(broker=guarded())
        async def pay(amount: int) -> None: ...


def test_an_async_actor_that_was_declared_before_the_middleware_is_refused_t8() -> None:
    # Given a broker that has one already
    broker = StubBroker()

    @dramatiq.actor(broker=broker)
    async def pay(amount: int) -> None: ...

    # When the guard is added
    guard = guarded().middleware[-1]
    with pytest.raises(ConfigurationError, match="'pay' is async"):
        broker.add_middleware(guard)


def test_an_async_actor_that_opted_out_is_accepted_t8() -> None:
    @dramatiq.actor(broker=guarded(), idempotency="off")
    async def pay(amount: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"idempotency": "transction"},
            "idempotency is 'transction'.*must be 'transaction' or 'external' or 'off'",
        ),
        ({"idempotency": "exactly-once"}, "must be 'transaction' or 'external' or 'off'"),
        ({"undone_by": 5}, "undone_by is 5; it must be the name of an actor"),
        ({"idempotency": None}, "must be 'transaction' or 'external' or 'off'"),
        ({"idempotency": False}, "must be 'transaction' or 'external' or 'off'"),
        ({"idempotency": []}, "must be 'transaction' or 'external' or 'off'"),
        ({"on_mismatch": "answr"}, "on_mismatch is 'answr'.*must be 'refuse' or 'answer'"),
        ({"on_mismatch": ""}, "must be 'refuse' or 'answer'"),
        ({"idle_limit_ms": "5s"}, "idle_limit_ms is '5s'.*milliseconds such as"),
        ({"idle_limit_ms": -1}, "idle_limit_ms is -1"),
        ({"idle_limit_ms": 1.5}, "idle_limit_ms is 1.5"),
        ({"idle_limit_ms": True}, "idle_limit_ms is True"),
        ({"idle_limit_ms": 2**31}, "idle_limit_ms is 2147483648"),
        ({"consumer_name": ""}, "consumer_name of actor 'pay' is empty"),
        ({"consumer_name": "x" * 513}, "consumer_name of actor 'pay' has 513 bytes"),
        ({"consumer_name": "a\x00"}, "consumer_name of actor 'pay' contains NUL"),
        ({"consumer_name": None}, "consumer_name of actor 'pay' is of type NoneType"),
    ],
    ids=str,
)
def test_an_unknown_value_of_an_option_is_refused(options: dict[str, Any], sentence: str) -> None:
    # Given a wrong value; when the actor is declared; then the error names it and right ones
    with pytest.raises(ConfigurationError, match=sentence):
        declare(guarded(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"idempotency": "transaction"},
        {"idempotency": "off"},
        {"on_mismatch": "refuse"},
        {"on_mismatch": "answer"},
        {"idle_limit_ms": 0},
        {"idle_limit_ms": 3_600_000},
        {"consumer_name": "payments"},
    ],
    ids=str,
)
def test_every_value_of_the_contract_is_accepted(options: dict[str, Any]) -> None:
    declare(guarded(), **options)


@pytest.mark.parametrize(
    "database",
    [peewee.PostgresqlDatabase("shop"), peewee.SqliteDatabase(":memory:"), None],
    ids=["postgresql", "sqlite", "none"],
)
def test_a_database_that_cannot_guard_a_transaction_is_refused(database: Any) -> None:
    # Given a table of keys on somebody else's kind of database
    class Keys(tables.ProcessedMessage):
        pass

    Keys._meta.set_database(database)

    # When the middleware is made; then the error says which class it must be
    with pytest.raises(ConfigurationError, match=r"The database of Keys is .* make it a Database"):
        IdempotentConsumer(Keys)


def test_a_durable_broker_without_the_guard_does_not_boot() -> None:
    # Given a broker on which nothing would ever be settled
    broker = DurableRedisBroker(url="redis://127.0.0.1:1/0")

    # When its worker boots; then the error says what to add
    with pytest.raises(ConfigurationError, match=r"add_middleware\(IdempotentConsumer"):
        dramatiq.Worker(broker).start()


def test_a_database_without_an_address_is_made_and_the_first_connection_names_the_variable() -> None:
    # Given a database without a URL
    database = Database(None, url_variable="SHOP_DATABASE")

    # When it is used; then the error names the variable
    for use in (database.connect, database.connection, lambda: database.execute_sql("SELECT 1")):
        with pytest.raises(ConfigurationError, match="SHOP_DATABASE is not set"):
            use()


def test_a_broker_without_an_address_is_made_and_the_first_connection_names_the_variable() -> None:
    # Given a broker without a URL, and an actor on it
    broker = DurableRedisBroker(url=None, url_variable="SHOP_REDIS")
    broker.add_middleware(guarded().middleware[-1])

    @dramatiq.actor(broker=broker)
    def pay(amount: int) -> None: ...

    # When it is used; then the error names the variable
    for use in (lambda: pay.send(1), lambda: broker.flush("default"), dramatiq.Worker(broker).start):
        with pytest.raises(ConfigurationError, match="SHOP_REDIS is not set"):
            use()


def test_a_worker_without_a_database_address_does_not_boot(stage: Stage) -> None:
    # Given a broker with Redis, whose database has no URL
    broker = DurableRedisBroker(url=stage.servers.redis.url)
    broker.add_middleware(guarded().middleware[-1])

    # When its worker boots; then the error names the variable
    with pytest.raises(ConfigurationError, match="DATABASE_URL is not set"):
        dramatiq.Worker(broker).start()


APPLICATION = """
import threading
import actors, models
assert threading.active_count() == 1, threading.enumerate()
for use in (lambda: actors.reserve_stock.send(1), lambda: list(models.Stock.select())):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_the_application_can_be_imported_without_addresses_and_starts_nothing() -> None:
    # Given an environment without either URL
    environment = {
        key: value for key, value in os.environ.items() if key not in ("DATABASE_URL", "REDIS_URL")
    }

    # When the application is imported, and then used
    done = subprocess.run(
        [sys.executable, "-c", APPLICATION],
        cwd=PROJECT, env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    # Then each first use names its variable
    for_redis, for_database = done.stdout.splitlines()
    assert for_redis.startswith("ConfigurationError REDIS_URL is not set")
    assert for_database.startswith("ConfigurationError DATABASE_URL is not set")


class Cluster(Valkey):
    """A Valkey that is a cluster of its own."""

    def prepare(self) -> list[str | Path]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return [*super().prepare(), "--cluster-enabled", "yes", "--cluster-port", str(port)]


@pytest.fixture
def cluster() -> Iterator[Valkey]:
    with temporary_folder() as folder, Cluster(folder) as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        yield server


def test_a_redis_cluster_is_refused(stage: Stage, cluster: Valkey) -> None:
    # Given the address of a cluster
    broker = DurableRedisBroker(url=cluster.url)
    broker.add_middleware(IdempotentConsumer(stage.inbox))

    # When a worker boots; then the error says what to use
    with pytest.raises(ConfigurationError, match=r"is a cluster.*use a single Redis"):
        dramatiq.Worker(broker).start()
    broker.client.close()


def test_every_refusal_is_one_of_ours() -> None:
    # A caller that catches our root catches them all.
    with pytest.raises(OnetakeError):
        declare(guarded(), idempotency="no")
