"""The relay publishes what is due: soon, once, in order, and whatever is wrong with one row."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

from .processes import eventually
from .relays import in_queue, send_many

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor

    from .ledger_stage import LedgerStage
    from .relays import RelayProcess

    StartRelay = Callable[..., RelayProcess]

pytest_plugins = ("tests.ledger_stage", "tests.relay_fixtures")

#: Far enough away not to come while a test looks.
LATER_MS = 60_000


def test_what_is_due_is_published_and_what_is_not_waits(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay
) -> None:
    # Given a row that is due, and one that is not
    due = ledger.send(write.message("now"))
    later = ledger.send(write.message("later"), delay=LATER_MS)

    # When a relay runs
    relay_beside(ledger)

    # Then the first is in Redis, and owed until it is done
    eventually(lambda: ledger.in_redis() == [due.message_id], what=ledger.rows)
    assert {row.message_id: row.published for row in ledger.rows()} == {
        due.message_id: True,
        later.message_id: False,
    }


def test_what_has_been_due_for_longest_is_published_first(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given more rows than one call to Redis carries, the last one due first
    sent = send_many(ledger, write, 40, load="x" * 10_000)
    ledger.sql(
        "UPDATE outbox_messages SET due_at = due_at - interval '1 hour' WHERE message_id = %s", sent[-1]
    )

    # When they are published
    with ledger.relay():
        eventually(lambda: len(ledger.in_redis()) == 40)

    # Then they wait in the order in which they were due
    assert in_queue(ledger) == [sent[-1], *sent[:-1]]


def test_a_row_whose_transaction_commits_late_is_not_passed_over_t16(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    with ledger.relay():
        # Given a row of a transaction that is open, older than one that has been published
        late = write.message("late")
        with ledger.rival() as rival:
            ledger.broker.enqueue_on(rival.connection, late)
            early = ledger.send(write.message("early"))
            eventually(lambda: ledger.in_redis() == [early.message_id])

            # When it commits
            rival.connection.commit()

        # Then it leaves too
        eventually(lambda: late.message_id in ledger.in_redis())


def test_a_row_that_somebody_holds_locked_holds_up_no_other_t38(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given two rows, the first of which is locked
    first, second = send_many(ledger, write, 2)
    with ledger.rival() as rival:
        rival.execute("SELECT FROM outbox_messages WHERE message_id = %s FOR UPDATE", (first,))

        # When a relay runs, then the other is published
        with ledger.relay():
            eventually(lambda: ledger.in_redis() == [second])

            # And the first when it is free
            rival.connection.rollback()
            eventually(lambda: sorted(ledger.in_redis()) == sorted([first, second]))


def test_two_relays_make_one_delivery_of_each_message(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay
) -> None:
    """2,000 messages make at most 2,100 deliveries when nothing is wrong."""
    # Given two relays and a worker, which has one of its own
    for _ in range(2):
        relay_beside(ledger)
    with ledger.worker(threads=4):
        # When 2,000 messages are sent
        for _ in range(20):
            send_many(ledger, write, 100)
        ledger.expect_settled(60)

    # Then each has taken effect once, and hardly any came twice
    assert len(ledger.effects()) == len(ledger.done()) == 2_000
    assert 2_000 <= len(ledger.witness.seen) <= 2_100


@pytest.mark.parametrize("key", ["default", "default.msgs"])
def test_a_row_that_cannot_be_published_is_set_aside_and_stops_no_other(
    ledger: LedgerStage, write: Actor[..., Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a queue whose key in Redis is of another type, and a row of it
    @ledger.actor(queue_name="other")
    def other(label: str) -> None:
        ledger.effect(label)

    ledger.redis.set(f"stage:{key}", "somebody else's")
    refused = ledger.send(write.message("refused"))

    with ledger.relay():
        # When a row of another queue is due after it
        published = ledger.send(other.message("published"))

        # Then that one is published, and the first set aside with its reason, also in the log
        eventually(lambda: in_queue(ledger, "other") == [published.message_id])
        row = eventually(lambda: next((row for row in ledger.rows() if row.refused), None))
        assert row is not None
        assert row.message_id == refused.message_id
        assert str(row.refused).startswith("WRONGTYPE")
        assert not row.published
        assert refused.message_id in caplog.text

        # And when somebody has mended the key, it is published with its next try
        ledger.redis.delete(f"stage:{key}")
        ledger.sql("UPDATE outbox_messages SET due_at = now() WHERE refused IS NOT NULL")
        eventually(lambda: in_queue(ledger) == [refused.message_id], what=ledger.rows)
    assert [row.refused for row in ledger.rows()] == [None, None]


def test_what_is_set_aside_is_tried_again_in_a_minute_and_not_sooner(
    ledger: LedgerStage, write: Actor[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    # Given a row that was set aside
    ledger.redis.set("stage:default", "somebody else's")
    ledger.send(write.message("refused"))
    with ledger.relay():
        eventually(lambda: ledger.row().refused)

        # When others are published after it
        ledger.redis.delete("stage:default")
        sent = ledger.send(write.message("published"))
        eventually(lambda: in_queue(ledger) == [sent.message_id])

    # Then it was tried once, and waits
    assert caplog.text.count("set aside") == 1
    assert 30 < ledger.rows()[-1].due_in_s < 60


def test_a_message_that_redis_never_takes_holds_up_no_other_t16(
    ledger_with: Callable[..., LedgerStage],
) -> None:
    # Given a Redis that hangs up on whoever sends it more than a mebibyte, and a message that is larger
    ledger = ledger_with(broker={"max_message_bytes": 2 << 20})

    @ledger.actor()
    def write(label: str, load: str = "") -> None:
        ledger.effect(label)

    ledger.redis.config_set("proto-max-bulk-len", 1 << 20)
    try:
        ledger.send(write.message("large", "x" * 1_300_000))
        with ledger.relay():
            # When others are due after it
            sent = send_many(ledger, write, 10)

            # Then these are published
            eventually(lambda: sorted(in_queue(ledger)) == sorted(sent), what=lambda: in_queue(ledger))
    finally:
        ledger.redis.config_set("proto-max-bulk-len", 512 << 20)


def test_a_queue_that_redis_forbids_holds_up_no_other_t16(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a Redis in which we may not write to one queue, and rows of it
    @ledger.actor(queue_name="other")
    def other(label: str, load: str = "") -> None:
        ledger.effect(label)

    client: Any = ledger.redis
    client.acl_setuser("default", enabled=True, reset_keys=True, keys=["stage:default*", "stage:_*", "stage"])
    try:
        send_many(ledger, other, 10)
        with ledger.relay():
            # When rows of another queue are due after them, for longer than it takes to try all
            sent = []
            for number in range(12):
                sent.append(ledger.send(write.message(str(number))))

                # Then they are published
                eventually(lambda: client.llen("stage:default") == len(sent), what=ledger.rows)
    finally:
        client.acl_setuser("default", enabled=True, keys=["*"])


@pytest.mark.parametrize("trouble", ["replica", "too few replicas"])
def test_a_redis_that_takes_no_writes_for_a_while_sets_nothing_aside_i9(
    ledger: LedgerStage, write: Actor[..., Any], trouble: str
) -> None:
    with ledger.relay():
        # Given a Redis that answers and refuses every write
        if trouble == "replica":
            ledger.redis.replicaof("127.0.0.1", 1)
        else:
            ledger.redis.config_set("min-replicas-to-write", 1)
        try:
            # When a message is sent
            sent = ledger.send(write.message("a"))
            tried_s = monotonic() + 1
            eventually(lambda: monotonic() > tried_s)
        finally:
            ledger.redis.replicaof("NO", "ONE")
            ledger.redis.config_set("min-replicas-to-write", 0)

        # Then it is published when that is over
        eventually(lambda: ledger.in_redis() == [sent.message_id], what=ledger.rows)
    assert ledger.row().refused is None
