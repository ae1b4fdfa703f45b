"""A message is a row until the transaction that inserts its key; an old attempt replaces no newer one."""

from __future__ import annotations

from threading import Barrier, Event
from typing import TYPE_CHECKING, Any

import psycopg2
import pytest
from dramatiq import Message, Middleware

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


def test_the_statement_that_inserts_the_key_deletes_the_row_i3(ledger: LedgerStage) -> None:
    # Given a message that came through the ledger, and a body that looks around
    seen: list[Any] = []
    begun, go_on = Event(), Event()

    @ledger.actor()
    def write(label: str) -> None:
        ask: Any = ledger.database.execute_sql
        seen.append(ask("SELECT count(*) FROM outbox_messages").fetchone())
        seen.append(ask("SELECT xmin::text, cmin::text FROM processed_messages").fetchone())
        begun.set()
        assert go_on.wait(10)
        ledger.effect(label)

    with ledger.worker_and_relay():
        sent = ledger.send(write.message("a"))
        assert begun.wait(10)

        # When its transaction is open
        # Then the row is gone in it, by the very statement that inserted the key
        assert seen[0] == (0,)
        assert ledger.sql("SELECT xmax::text, cmax::text FROM outbox_messages") == [seen[1]]

        # And for everybody else the message is owed as long as that has not committed
        assert ledger.owed() == [sent.message_id]
        go_on.set()
        ledger.expect_settled()
    assert ledger.sql("SELECT consumer_name, message_id FROM processed_messages") == [
        ("write", sent.message_id)
    ]


def test_a_roll_back_of_the_claim_leaves_the_row_as_it_was_i3(ledger: LedgerStage) -> None:
    # Given a message whose transaction is open
    begun, go_on = Event(), Event()

    @ledger.actor()
    def write() -> None:
        begun.set()
        assert go_on.wait(10)

    with ledger.worker_and_relay(threads=1):
        ledger.send(write.message())
        assert begun.wait(10)
        before = ledger.row()

        # When PostgreSQL loses it
        begun.clear()
        ledger.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in tr%%'")
        eventually(lambda: not ledger.sql("SELECT 1 FROM pg_stat_activity WHERE state LIKE 'idle in tr%%'"))

        # Then the same row is there, and the message comes again
        assert ledger.row().is_still(before)
        go_on.set()
        assert begun.wait(10)
        ledger.expect_settled()


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "pgbouncer"])
def test_the_claim_deletes_the_row_whether_it_is_prepared_or_not_t6(
    ledger_with: Callable[..., LedgerStage], *, prepared: bool
) -> None:
    # Given a database behind pgbouncer, or not
    ledger = ledger_with(database={"pgbouncer": not prepared})

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    # When messages of the ledger, and others, are performed by one thread in turn
    with ledger.worker_and_relay(threads=1):
        for label in ("a", "b"):
            ledger.send(write.message(label))
            write.send(f"{label} past the ledger")
        eventually(lambda: len(ledger.effects()) == 4)

        # Then nothing is owed
        ledger.expect_settled()


def test_names_with_dashes_and_digits_find_their_rows(ledger: LedgerStage) -> None:
    # Given actors and messages whose names look like parts of each other
    def write(label: str) -> None:
        ledger.effect(label)

    names = [("a", "1-b"), ("a-1", "b"), ("a-1-b", "-"), ("ä-€", "9-9"), ("1", "owed-1-1-a")]
    actors = {name: ledger.actor(actor_name=name)(write) for name, _ in names}

    # When a message of each goes through the ledger
    with ledger.worker_and_relay():
        for name, message_id in names:
            message = actors[name].message(f"{name}|{message_id}")._replace(message_id=message_id)
            ledger.send(message)
        eventually(lambda: len(ledger.effects()) == len(names))

        # Then each settled its own row
        ledger.expect_settled()
    assert ledger.letters() == []


# Attempts


def failing_twice_at_once(ledger: LedgerStage, *, max_retries: int) -> tuple[Any, list[int], Barrier]:
    """An actor whose first two deliveries fail at the same moment; and the retries that each carried."""
    both = Barrier(2)
    retries: list[int] = []

    class Notes(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            retries.append(message.options.get("retries", 0))

    ledger.broker.add_middleware(Notes())

    @ledger.actor(idempotency="off", min_backoff=10, max_backoff=10, max_retries=max_retries)
    def fails(label: str) -> None:
        if len(retries) <= 2:
            both.wait(10)
        raise ValueError(label)

    return fails, retries, both


@pytest.mark.parametrize("through_the_ledger", [True, False])
def test_a_message_that_was_delivered_twice_at_once_has_one_chain_of_retries(
    ledger: LedgerStage, *, through_the_ledger: bool
) -> None:
    # Given an actor that always fails, and a message of which a worker that died had a copy
    fails, retries, _ = failing_twice_at_once(ledger, max_retries=3)
    message = fails.message("a")
    if through_the_ledger:
        ledger.send(message)
    else:
        ledger.broker.enqueue(message)
    ledger.broker.enqueue(message)

    # When both deliveries fail at the same moment
    with ledger.worker_and_relay():
        eventually(ledger.letters, 20, what=lambda: (retries, ledger.rows()))
        ledger.expect_settled()

    # Then there was one retry after another, and one dead letter
    assert retries == [0, 0, 1, 2, 3]
    assert len(ledger.letters()) == 1


def test_an_old_attempt_never_replaces_a_newer_one(ledger: LedgerStage) -> None:
    # Given a message that is delivered twice, and whose first delivery is slow
    slow, go_on = Event(), Event()

    @ledger.actor(idempotency="off")
    def fails(label: str) -> None:
        if not slow.is_set():
            slow.set()
            assert go_on.wait(10)
            raise ValueError("slow")
        raise ValueError("fast")

    with ledger.worker(threads=2):
        message = fails.send("a")
        assert slow.wait(10)
        ledger.broker.enqueue(message)
        eventually(ledger.rows)
        # Since then its row is of a later attempt
        ledger.sql("UPDATE outbox_messages SET attempt = 5")
        before = ledger.row()

        # When the slow one fails at last
        go_on.set()
        eventually(lambda: ledger.in_redis() == [])

    # Then the row is as it was
    assert ledger.row().is_still(before)
    assert "fast" in ledger.row().message.options["traceback"]


def test_the_end_of_an_old_attempt_does_not_end_a_newer_one(ledger: LedgerStage) -> None:
    # Given a delivery that came from the first attempt of a row which has had a retry since
    begun, go_on = Event(), Event()

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)
        begun.set()
        assert go_on.wait(10)

    with ledger.worker(threads=1):
        message = ledger.send(write.message("a"))
        assert begun.wait(10)
        before = ledger.row()._replace(attempt=1, published=False)
        go_on.set()
        ledger.expect_settled()
    insert = "INSERT INTO outbox_messages (message_id, actor_name, queue_name, attempt, message, due_at)"
    ledger.sql(
        f"{insert} VALUES (%s, 'write', 'default', 1, %s, now() + interval '1 minute')",
        message.message_id,
        psycopg2.Binary(message.encode()),
    )

    # When the first attempt is delivered again and is a duplicate
    put_owed(ledger, message, attempt=0)
    with ledger.worker(threads=1):
        eventually(lambda: ledger.in_redis() == [])

    # Then the retry is still owed, and nobody has run it before its time
    assert ledger.row().is_still(before)
    assert ledger.effects() == ["a"]


def test_a_late_copy_of_a_dead_message_begins_no_second_chain_of_retries(ledger: LedgerStage) -> None:
    # Given a message that has failed for good
    @ledger.actor(max_retries=1, min_backoff=10, max_backoff=10)
    def fails(label: str) -> None:
        tries.append(label)
        raise ValueError(label)

    tries: list[str] = []
    with ledger.worker_and_relay():
        message = ledger.send(fails.message("a"))
        eventually(ledger.letters)
        ledger.expect_settled()

        # When its first delivery comes once more, from a worker that was killed before it acknowledged
        put_owed(ledger, message, attempt=0)
        eventually(lambda: len(tries) > 2)
        ledger.expect_settled()

    # Then it has run once more, and that is all
    assert len(tries) == 3
    assert len(ledger.letters()) == 1


def put_owed(ledger: LedgerStage, message: Message[Any], attempt: int) -> None:
    """Deliver an attempt of a row, as a sweep or an audit does."""
    redis_id = f"owed-{attempt}-{len(message.actor_name)}-{message.actor_name}{message.message_id}"
    ledger.redis.hset("stage:default.msgs", redis_id, message.encode())
    ledger.redis.rpush("stage:default", redis_id)


# Mutated arguments


@pytest.mark.parametrize("max_retries", [1, 0], ids=["retry", "dead letter"])
@pytest.mark.parametrize("idempotency", ["transaction", "off"])
def test_what_is_stored_after_a_failure_has_the_arguments_that_came_t17(
    ledger: LedgerStage, idempotency: str, max_retries: int
) -> None:
    # Given a body that changes its arguments and then fails
    @ledger.actor(idempotency=idempotency, max_retries=max_retries)
    def fails(labels: list[str], *, more: dict[str, str]) -> None:
        labels.clear()
        more["spoiled"] = "yes"
        raise ValueError("no")

    # When it is performed
    with ledger.worker_and_relay():
        message = ledger.send(fails.message(["a"], more={"b": "c"}))
        eventually(lambda: ledger.letters() or any(row.attempt == 1 for row in ledger.rows()))

    # Then the row has what was sent
    stored = ledger.row().message if max_retries else Message.decode(ledger.letter().message)
    assert (stored.args, stored.kwargs) == (message.args, message.kwargs) == ((["a"],), {"more": {"b": "c"}})


def test_a_dead_message_that_is_sent_once_more_has_an_end_again(ledger: LedgerStage) -> None:
    # Given a message that has failed for good, and whose dead letter is still there
    tries: list[str] = []

    @ledger.actor(max_retries=0)
    def fails(label: str) -> None:
        tries.append(label)
        raise ValueError(label)

    with ledger.worker_and_relay():
        message = ledger.send(fails.message("a"))
        eventually(ledger.letters)
        ledger.expect_settled()

        # When somebody sends it once more, and it fails again
        ledger.send(message)
        eventually(lambda: len(tries) > 1)

        # Then it is owed no longer, and does not come again and again
        ledger.expect_settled()
    assert len(tries) == 2
    assert 1 <= len(ledger.letters()) <= 2
