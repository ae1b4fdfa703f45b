"""Trouble of the infrastructure costs time and nothing else, and leaves a clean thread behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from time import monotonic
from urllib.parse import parse_qs, quote, urlsplit

import psycopg2
import pytest

from models import ProcessedMessage

from .faults.actors import (
    broker,
    leave_a_transaction_open,
    sell,
    sell_at_the_limit,
    sell_without_a_pause,
)
from .faults.crew import Crew
from .faults.proxy import Proxy
from .faults.shop import Shop
from .faults.signals import signals
from .processes import Kind, WorkerProcess, eventually
from .servers import Servers

pytest_plugins = ("tests.faults.fixtures",)

SOCKET = ".s.PGSQL.5432"
HANG_UP = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
HANG_UP_IN_TRANSACTION = f"{HANG_UP} AND state = 'idle in transaction'"


def assert_goes_on(shop: Shop, worker: WorkerProcess) -> None:
    """I8: the only thread of the worker takes the next message with a clean connection."""
    shop.send("next", max_retries=0)
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.orders("next") == 1
    assert shop.runs("next") == 1
    assert shop.open_transactions() == 0


def test_a_connection_lost_in_the_body_gives_the_message_back(shop: Shop, lone_worker: WorkerProcess) -> None:
    """I8, I9, T5: no retry is spent, by a message that has none."""
    # Given a body whose connection is cut
    shop.hold("body", "a")
    shop.send("a", max_retries=0)
    eventually(lambda: shop.runs("a"), what=lone_worker.output)
    assert shop.sql(HANG_UP_IN_TRANSACTION) == 1
    eventually(lambda: shop.open_transactions() == 0)

    # When it sends its next statement
    shop.release("body", "a")

    # Then the message comes again and takes effect once
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 2
    assert shop.retries("a") == [0, 0]
    assert_goes_on(shop, lone_worker)


def test_a_connection_lost_between_two_messages_is_replaced_before_the_next(
    shop: Shop, lone_worker: WorkerProcess
) -> None:
    """I8, T5: the thread notices before it begins, not by an error."""
    # Given a thread that has a connection
    assert_goes_on(shop, lone_worker)

    # When the server cuts it
    shop.sql(HANG_UP)

    # Then the next message is performed at its first delivery
    shop.send("a", max_retries=0)
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)
    assert shop.orders("a") == 1
    assert len(shop.reached("begin", "a")) == 1


@pytest.mark.parametrize("how", ["terminate", "fast", "immediate"])
def test_the_first_statement_after_the_server_hung_up_reconnects(how: str, shop: Shop) -> None:
    """T5: without an error, since no transaction was open."""
    # Given a connection of this process
    assert ProcessedMessage.select().count() == 0

    # When the server hangs up
    if how == "terminate":
        shop.sql(HANG_UP)
    else:
        shop.servers.postgres.restart("immediate" if how == "immediate" else "fast")

    # Then the next statement works
    assert ProcessedMessage.select().count() == 0


def test_a_time_limit_in_the_body_rolls_back_and_the_retry_does_the_work(
    shop: Shop, lone_worker: WorkerProcess
) -> None:
    """I8, T4: an interrupt spends a retry and leaves no open transaction behind."""
    # Given a body that has written an order and then runs into its time limit
    shop.hold("body", "a")
    shop.send("a", time_limit=200)

    # When it was interrupted
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)

    # Then the retry has taken effect, and nothing else
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 2
    assert shop.retries("a") == [0, 1]
    assert_goes_on(shop, lone_worker)


def test_a_transaction_that_was_left_open_is_not_committed_with_the_next_message(
    shop: Shop, lone_worker: WorkerProcess
) -> None:
    """I8, T4: before each delivery the connection is idle, or else discarded."""
    # Given a thread whose connection is in a transaction that nobody knows of
    shop.send("left", actor=leave_a_transaction_open)
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)
    assert shop.open_transactions() == 1

    # When the next message is performed on it
    assert_goes_on(shop, lone_worker)

    # Then what was left is gone
    assert shop.books() == (1, 1, 1, 1)


def test_a_body_that_is_silent_beyond_its_idle_limit_fails_and_hears_which_option_to_raise(
    shop: Shop, lone_worker: WorkerProcess
) -> None:
    """I8, T6: PostgreSQL frees the key; that is the actor's failure, not the server's."""
    # Given a body that sends nothing until the server has ended its transaction
    shop.hold("body", "a")
    shop.send("a", actor=sell_without_a_pause)
    eventually(lambda: shop.runs("a"), what=lone_worker.output)
    eventually(lambda: shop.open_transactions() == 0)

    # When it sends its next statement
    shop.release("body", "a")

    # Then it has failed, and its retry does the work
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.retries("a") == [0, 1]
    assert "idle_limit_ms" in lone_worker.output()
    assert_goes_on(shop, lone_worker)


def test_an_outage_longer_than_the_time_limit_spends_no_retry(shop: Shop, lone_worker: WorkerProcess) -> None:
    """I9, T20: waiting for an absent database uses up no time limit."""
    # Given a message that comes while PostgreSQL is away
    shop.servers.postgres.stop()
    shop.send("a", time_limit=200, max_retries=0)
    eventually(lambda: shop.reached("begin", "a"), what=lone_worker.output)

    # When it stays away for longer than the message's time limit
    over_s = monotonic() + 1
    eventually(lambda: monotonic() > over_s)
    shop.servers.postgres.start()

    # Then the message is performed at its first delivery
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert len(shop.reached("begin", "a")) == 1
    assert_goes_on(shop, lone_worker)


def test_a_missing_table_is_waited_for(shop: Shop, lone_worker: WorkerProcess) -> None:
    """I9: the claim fails with class 42, also where its statement was prepared before."""
    # Given a worker whose inbox disappears
    assert_goes_on(shop, lone_worker)
    reason = 'relation "processed_messages" does not exist'
    shop.sql("ALTER TABLE processed_messages RENAME TO away")
    try:
        shop.send("a", max_retries=0)
        eventually(lambda: reason in lone_worker.output(), what=lone_worker.output)
    finally:
        # When it is there again
        shop.sql("ALTER TABLE away RENAME TO processed_messages")

    # Then the message is performed
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)
    assert shop.books() == (2, 2, 2, 2)
    assert shop.retries("a") == [0]


def test_a_key_that_is_held_longer_than_lock_timeout_stops_neither_its_message_nor_others(
    shop: Shop, crew: Crew
) -> None:
    """I9, T11, T20: given back as often as need be; neither retries nor time limit are spent."""
    # Given a message whose key somebody holds, with a time limit shorter than lock_timeout
    worker = crew.start(threads=1, env={"LOCK_TIMEOUT_MS": "400"})
    message = sell.message_with_options(args=("a",), max_retries=0, time_limit=100)
    holder = psycopg2.connect(shop.servers.postgres.url)
    holder.cursor().execute(
        "INSERT INTO processed_messages VALUES ('sell', %s, 'another', '', 1)", (message.message_id,)
    )

    # When it is delivered again and again to a worker of one thread
    broker.enqueue(message)
    eventually(lambda: len(shop.reached("begin", "a")) == 3, what=worker.output)

    # Then another message gets its turn in between
    shop.send("b")
    eventually(lambda: shop.orders("b") == 1, what=worker.output)

    # And the first is performed as soon as the key is free
    holder.close()
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (2, 2, 2, 2)
    assert set(shop.retries("a")) == {0}
    assert shop.runs("a") == 1


def test_the_key_of_a_worker_that_is_paused_becomes_free(shop: Shop, crew: Crew) -> None:
    """I1, T6: idle_in_transaction_session_timeout frees it; nobody needs to kill the session."""
    # Given a worker that is paused in its transaction, and another one
    limits = {"LOCK_TIMEOUT_MS": "300", "IDLE_LIMIT_MS": "1500"}
    paused = crew.start(heartbeat_ms=500, env=limits)
    shop.hold("end", "a")
    shop.send("a")
    eventually(lambda: shop.reached("end", "a"), what=crew.output)
    paused.signal(SIGSTOP)
    crew.start(heartbeat_ms=500, env=limits)

    # When the message comes to the other
    shop.release("end", "a")
    eventually(lambda: shop.orders("a") == 1, what=crew.output)

    # Then the first, when it goes on, changes nothing any more
    paused.signal(SIGCONT)
    eventually(lambda: len(shop.reached("ack", "a")) == len(shop.reached("begin", "a")))
    eventually(lambda: shop.owed() == 0, what=crew.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 2


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
        shop.sql(f"{HANG_UP} AND {committing}")

        # Then it was not acknowledged, and the message comes again
        eventually(lambda: shop.runs("a") == 2, what=worker.output)
        assert shop.books() == (0, 0, 0, 0)
        eventually(lambda: shop.sql(count) == 1, what=worker.output)
        holder.close()
        eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.retries("a") == [0, 0]


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
    assert_goes_on(shop, lone_worker)


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        pytest.param(b"BEGIN\0", 1, id="to the claim"),
        pytest.param(b"UPDATE 1\0", 2, id="to a statement of the body"),
        pytest.param(b"COMMIT\0", 1, id="to the commit"),
    ],
)
@pytest.mark.parametrize("kind", ["threads", "gevent"])
def test_a_lost_answer_of_postgresql(
    kind: Kind, answer: bytes, runs: int, shop: Shop, crew: Crew, tmp_path: Path
) -> None:
    """I1, I2, I9: whatever the server did before its answer got lost, there is one effect."""
    # Given a worker behind a proxy that will lose an answer
    (socket_folder,) = parse_qs(urlsplit(shop.servers.postgres.url).query)["host"]
    with Proxy(f"{socket_folder}/{SOCKET}", str(tmp_path / SOCKET)) as proxy:
        url = f"postgresql://postgres@/postgres?host={quote(str(tmp_path), safe='')}"
        worker = crew.start(kind=kind, env={"DATABASE_URL": url})
        proxy.lose_answer_with(answer)

        # When a message that has no retries is performed
        shop.send("a", max_retries=0)
        eventually(lambda: shop.owed() == 0, what=worker.output)

    # Then there is one effect
    assert proxy.lost.is_set()
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == runs
    assert set(shop.retries("a")) == {0}


def test_a_time_limit_that_has_passed_does_not_reach_the_hooks_after_the_body(shop: Shop, crew: Crew) -> None:
    """T20: if it did, the retry would be lost and the thread would die."""
    # Given a body that fails within its time limit, and a hook that takes longer
    worker = crew.start(threads=2)
    signals.set("fail-a")
    shop.hold("processed", "a")
    shop.send("a", time_limit=300)
    eventually(lambda: shop.reached("processed", "a"), what=worker.output)

    # When that limit is over, as another message shows that began later and runs into its own
    shop.hold("body", "b")
    shop.send("b", time_limit=300)
    eventually(lambda: shop.retries("b") == [0, 1], what=worker.output)
    shop.release("processed", "a")

    # Then the retry was stored, and both threads live
    eventually(lambda: shop.retries("a") == [0, 1], what=worker.output)
    eventually(lambda: shop.owed() == 0, what=worker.output)
    for label in ("c", "d"):
        shop.hold("body", label)
        shop.send(label)
    eventually(lambda: shop.runs("c") == shop.runs("d") == 1, what=worker.output)


def test_a_time_limit_that_fires_as_the_body_ends_is_waited_for_and_handled(shop: Shop, crew: Crew) -> None:
    """T20: TimeLimit clears the deadline first and raises after that."""
    # Given a worker of one thread
    worker = crew.start(threads=1)

    # When a body ends in that moment
    signals.set("late-a")
    shop.send("a", actor=sell_at_the_limit)
    eventually(lambda: shop.owed() == 0, what=worker.output)

    # Then the delivery has failed, its retry was stored and performed by the same thread
    assert shop.books() == (1, 1, 1, 1)
    assert shop.retries("a") == [0, 1]
    assert len({thread for _, thread, *_ in shop.reached("body", "a")}) == 1
    assert_goes_on(shop, worker)


@pytest.fixture(scope="module")
def guest(servers: Servers) -> Iterator[str]:
    """The URL of a role that needs its password, may only work with rows, and is no superuser."""
    hba = servers.postgres.data / "pg_hba.conf"
    trusting = hba.read_text()
    connection = psycopg2.connect(servers.postgres.url)
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute("CREATE ROLE guest LOGIN PASSWORD 'right'")
    cursor.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO guest")
    hba.write_text(f"local all guest scram-sha-256\n{trusting}")
    cursor.execute("SELECT pg_reload_conf()")
    yield servers.postgres.url.replace("postgres@", "guest:right@")
    hba.write_text(trusting)
    cursor.execute("SELECT pg_reload_conf()")
    cursor.execute("DROP OWNED BY guest; DROP ROLE guest")
    connection.close()


@pytest.mark.parametrize(
    ("trouble", "cure", "reason"),
    [
        pytest.param(
            "ALTER ROLE guest PASSWORD 'wrong'",
            "ALTER ROLE guest PASSWORD 'right'",
            "password authentication failed",
            id="wrong password",
        ),
        pytest.param(
            "ALTER ROLE guest CONNECTION LIMIT 0",
            "ALTER ROLE guest CONNECTION LIMIT -1",
            "too many connections",
            id="too many connections",
        ),
        pytest.param(
            "ALTER ROLE guest SET default_transaction_read_only = on",
            "ALTER ROLE guest RESET default_transaction_read_only",
            "read-only transaction",
            id="read-only server",
        ),
        pytest.param(
            "REVOKE INSERT ON processed_messages FROM guest",
            "GRANT INSERT ON processed_messages TO guest",
            "permission denied",
            id="missing right",
        ),
    ],
)
def test_whatever_keeps_a_transaction_from_beginning_is_waited_for(
    trouble: str, cure: str, reason: str, guest: str, shop: Shop, crew: Crew
) -> None:
    """I9: no retry is spent, and the reason is logged once."""
    # Given a worker that cannot begin
    shop.sql(trouble)
    try:
        worker = crew.start(threads=1, env={"DATABASE_URL": guest})
        shop.send("a", max_retries=0)
        eventually(lambda: reason in worker.output(), what=worker.output)
    finally:
        # When the reason has gone
        shop.sql(cure)

    # Then the message is performed
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.retries("a") == [0]
    assert worker.output().count(reason) == 1
