"""A message is acknowledged after its commit was confirmed, and not before (I2)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg2
import pytest

from .lossy_proxy import LossyProxy
from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .faults.crew import Crew
    from .faults.shop import Shop
    from .processes import WorkerProcess

pytest_plugins = ("tests.faults.fixtures",)


@contextmanager
def orders_that_at_commit(shop: Shop, do: str) -> Iterator[None]:
    """Let PostgreSQL do something when a transaction that wrote an order commits."""
    shop.sql(
        f"CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {do}; RETURN NULL; END $$; "
        f"CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON orders "
        f"DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION at_commit()"
    )
    try:
        yield
    finally:
        shop.sql("DROP FUNCTION at_commit CASCADE")


def test_nothing_is_acknowledged_while_the_server_has_not_confirmed_the_commit(
    shop: Shop, crew: Crew
) -> None:
    """I2, I9: a connection that is lost in COMMIT leaves the outcome open, so it comes again."""
    worker = crew.start(env={"LOCK_TIMEOUT_MS": "20000"})
    committing = "state = 'active' AND query = 'COMMIT' AND wait_event_type = 'Lock'"
    count = f"SELECT count(*) FROM pg_stat_activity WHERE {committing}"
    with orders_that_at_commit(shop, "PERFORM pg_advisory_xact_lock(1)"):
        # Given a delivery whose COMMIT takes its time
        holder = psycopg2.connect(shop.servers.postgres.url)
        holder.cursor().execute("SELECT pg_advisory_lock(1)")
        shop.send("a", max_retries=0)
        eventually(lambda: shop.sql(count) == 1, what=worker.output)
        assert shop.owed() == 1
        assert shop.reached("processed", "a") == []

        # When its connection is lost there
        shop.hang_up(committing)

        # Then it was not acknowledged, and the message comes again
        eventually(lambda: shop.runs("a") == 2, what=worker.output)
        assert shop.books() == (0, 0, 0, 0)
        eventually(lambda: shop.sql(count) == 1, what=worker.output)
        holder.close()
        eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.retries("a") == [0, 0]
    assert shop.dead() == []


def test_a_commit_that_the_server_refuses_is_a_failure(shop: Shop, lone_worker: WorkerProcess) -> None:
    """I2, T1: the error comes after the body, and is not acknowledged away."""
    with orders_that_at_commit(shop, "RAISE 'not this one'"):
        # Given a message that has no retries, and a server that will refuse its COMMIT
        shop.send("a", max_retries=0)

        # When it has been performed
        eventually(lambda: shop.owed() == 0, what=lone_worker.output)

    # Then it is a dead letter without effect
    assert len(shop.dead()) == 1
    assert shop.books() == (0, 0, 0, 0)
    shop.expect_goes_on(lone_worker)


@pytest.mark.parametrize(
    ("statement", "runs"), [("BEGIN; ", 1), ("UPDATE ", 2), ("COMMIT", 1)], ids=["claim", "body", "commit"]
)
def test_a_lost_answer_of_postgresql_costs_a_greenlet_nothing(
    statement: str, runs: int, shop: Shop, crew: Crew
) -> None:
    """I1, I2, I9, T7: whatever the server did before its answer got lost, there is one effect."""
    # Given a gevent worker whose connection breaks when the server has done what was asked
    with LossyProxy(shop.servers.postgres.url) as proxy:
        worker = crew.start(kind="gevent", env={"DATABASE_URL": proxy.address})
        proxy.lose("answer", statement)

        # When a message that has no retries is performed
        shop.send("a", max_retries=0)
        eventually(lambda: shop.owed() == 0, what=worker.output)

    # Then there is one effect
    assert proxy.losses == 1
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == runs
    assert set(shop.retries("a")) == {0}
    assert shop.dead() == []
