"""Trouble of the infrastructure costs time and nothing else, and leaves a clean thread behind."""

from __future__ import annotations

from signal import SIGCONT, SIGSTOP
from time import monotonic
from typing import TYPE_CHECKING

import psycopg2
import pytest

from models import ProcessedMessage

from .faults.actors import broker, sell
from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .faults.crew import Crew
    from .faults.shop import Shop
    from .processes import WorkerProcess

pytest_plugins = ("tests.faults.fixtures",)


def test_a_connection_lost_in_the_body_gives_the_message_back(shop: Shop, lone_worker: WorkerProcess) -> None:
    """I8, I9, T5: no retry is spent, by a message that has none."""
    # Given a body whose connection is cut
    shop.hold("body", "a")
    shop.send("a", max_retries=0)
    eventually(lambda: shop.runs("a"), what=lone_worker.output)
    shop.hang_up("state = 'idle in transaction'")

    # When it sends its next statement
    shop.release("body", "a")

    # Then the message comes again and takes effect once
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)
    assert shop.books() == (1, 1, 1, 1)
    assert shop.runs("a") == 2
    assert shop.retries("a") == [0, 0]
    shop.expect_goes_on(lone_worker)


def test_a_connection_lost_between_two_messages_is_replaced_before_the_next(
    shop: Shop, lone_worker: WorkerProcess
) -> None:
    """I8, T5: without a retry, and without another delivery."""
    # Given a thread that has a connection
    shop.expect_goes_on(lone_worker)

    # When the server cuts it
    shop.hang_up()

    # Then the next message is performed at its first delivery
    shop.send("a", max_retries=0)
    eventually(lambda: shop.owed() == 0, what=lone_worker.output)
    assert shop.orders("a") == 1
    assert len(shop.reached("begin", "a")) == 1


@pytest.mark.parametrize("how", ["cut", "restart", "crash"])
def test_the_first_statement_after_the_server_hung_up_reconnects(how: str, shop: Shop) -> None:
    """T5: without an error, since no transaction was open."""
    # Given a connection of this process
    assert ProcessedMessage.select().count() == 0

    # When the server hangs up
    if how == "cut":
        shop.hang_up()
    else:
        shop.servers.postgres.restart("immediate" if how == "crash" else "fast")

    # Then the next statement works
    assert ProcessedMessage.select().count() == 0


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
    shop.expect_goes_on(lone_worker)


def test_a_missing_table_is_waited_for(shop: Shop, lone_worker: WorkerProcess) -> None:
    """I9: the claim fails with class 42, also where its statement was prepared before."""
    # Given a worker whose inbox disappears
    shop.expect_goes_on(lone_worker)
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


@pytest.fixture
def guest(shop: Shop) -> Iterator[str]:
    """The URL of a role that needs a password, with the wrong one."""
    hba = shop.servers.postgres.data / "pg_hba.conf"
    trusting = hba.read_text()
    shop.sql("CREATE ROLE guest LOGIN PASSWORD 'right'")
    shop.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO guest")
    hba.write_text(f"local all guest scram-sha-256\n{trusting}")
    shop.sql("SELECT pg_reload_conf()")
    yield shop.servers.postgres.url.replace("postgres@", "guest:wrong@")
    hba.write_text(trusting)
    shop.sql("SELECT pg_reload_conf()")
    shop.sql("DROP OWNED BY guest; DROP ROLE guest")


def test_a_wrong_password_is_waited_for(guest: str, shop: Shop, crew: Crew) -> None:
    """I9: no retry is spent, and the reason is logged once."""
    # Given a worker that is refused
    reason = "password authentication failed"
    worker = crew.start(env={"DATABASE_URL": guest})
    for label in ("a", "b"):
        shop.send(label, max_retries=0)
    eventually(lambda: reason in worker.output(), what=worker.output)

    # When the password is the right one
    shop.sql("ALTER ROLE guest PASSWORD 'wrong'")

    # Then the messages are performed at their first delivery
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (2, 2, 2, 2)
    assert shop.retries("a") == shop.retries("b") == [0]
    assert worker.output().count(reason) == 1


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
