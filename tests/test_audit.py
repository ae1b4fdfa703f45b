"""The audit: whatever Redis has lost is published again within 10 s, and nothing else is."""

from __future__ import annotations

from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

import dramatiq.worker
import pytest

from .processes import eventually
from .relays import ForgetfulValkey, in_queue, send_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dramatiq import Actor

    from middleware.relay import Relay

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.ledger_stage", "tests.relay_fixtures")

#: "The audit finds it within 10 s."
FOUND_S = 10

QUEUE = "stage:default"


class Bodies:
    """An actor whose bodies stay until they are let go."""

    def __init__(self, stage: LedgerStage) -> None:
        self.stage = stage
        self.begun: list[str] = []
        self.free = Event()

        @stage.actor()
        def write(label: str, load: str = "") -> None:
            self.begun.append(label)
            self.free.wait(20)
            stage.effect(label)

        self.write: Actor[..., Any] = write


@pytest.fixture
def bodies(frail: LedgerStage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bodies]:
    """Of a worker that takes four messages, and runs two of them at once."""
    monkeypatch.setattr(dramatiq.worker, "QUEUE_PREFETCH", 4)
    bodies = Bodies(frail)
    yield bodies
    bodies.free.set()


def hand_of(stage: LedgerStage) -> set[bytes]:
    """What the worker of this process has in hand."""
    return stage.broker.ids_in_hand("default")


def under_way(stage: LedgerStage) -> set[str]:
    """The messages that a worker can still get, or has: payload and id are there."""
    client: Any = stage.redis
    payloads = client.hkeys(f"{QUEUE}.msgs")
    ids = {*client.lrange(QUEUE, 0, -1), *hand_of(stage)}
    return {redis_id.decode()[len("owed-0-5-write") :] for redis_id in payloads if redis_id in ids}


def let_redis_crash(stage: LedgerStage) -> None:
    assert isinstance(stage.servers.redis, ForgetfulValkey)
    stage.servers.redis.crash()


#: How Redis loses what it has.
LOSSES: dict[str, Callable[[LedgerStage], object]] = {
    "emptied while running": lambda stage: stage.redis.flushall(),
    "back empty": let_redis_crash,
    "a queue without its list": lambda stage: stage.redis.delete(QUEUE),
    "a queue without its payloads": lambda stage: stage.redis.delete(f"{QUEUE}.msgs"),
    "a queue without both": lambda stage: stage.redis.delete(QUEUE, f"{QUEUE}.msgs"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_was_running_prefetched_or_waiting_takes_effect_once_whatever_redis_loses_i7(
    frail: LedgerStage, bodies: Bodies, loss: str
) -> None:
    # Given messages of which two run, two wait in the worker's memory, and eight in Redis
    with frail.relay(), frail.worker(threads=2):
        sent = send_many(frail, bodies.write, 12)
        eventually(lambda: len(bodies.begun) == 2 and len(hand_of(frail)) == 4)
        eventually(lambda: len(in_queue(frail)) == 8)

        # When Redis loses them
        LOSSES[loss](frail)

        # Then all but those two are back within 10 s, though nothing has ended meanwhile
        missed = {sent[number] for number in range(12) if str(number) not in bodies.begun}
        eventually(lambda: under_way(frail) >= missed, FOUND_S, what=lambda: under_way(frail))
        assert len(bodies.begun) == 2

        # And when the bodies go on, each takes effect once
        bodies.free.set()
        frail.expect_settled()
    assert frail.effects() == sorted(str(number) for number in range(12))


def test_a_redis_that_comes_back_from_an_older_snapshot_loses_and_doubles_nothing_i7(
    frail: LedgerStage, bodies: Bodies
) -> None:
    with frail.relay(), frail.worker(threads=2):
        # Given a snapshot of Redis with messages that are done afterwards
        sent = send_many(frail, bodies.write, 6)
        eventually(lambda: under_way(frail) == set(sent) and len(hand_of(frail)) == 4)
        frail.redis.save()
        bodies.free.set()
        frail.expect_settled()

        # And messages that come after it
        bodies.free.clear()
        sent = send_many(frail, bodies.write, 6, load="after")
        eventually(lambda: under_way(frail) == set(sent) and len(bodies.begun) == 8)

        # When Redis comes back as it was then
        let_redis_crash(frail)

        # Then the later messages are there again, but for those that run
        missed = {sent[number] for number in range(6) if str(number) not in bodies.begun[6:]}
        eventually(lambda: under_way(frail) >= missed, FOUND_S, what=lambda: under_way(frail))

        # And all of them take effect once
        bodies.free.set()
        frail.expect_settled()
    assert frail.effects() == sorted(2 * [str(number) for number in range(6)])


def test_an_id_that_an_older_snapshot_puts_into_a_living_workers_hand_is_given_back(
    frail: LedgerStage, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has nothing to ask does not notice that Redis was away."""
    monkeypatch.setattr(dramatiq.worker, "QUEUE_PREFETCH", 1)

    @frail.actor()
    def wait_for_key(label: str) -> None:
        frail.effect(label)

    with frail.relay(), frail.worker(threads=1):
        # Given a snapshot of Redis with a message in the hand of a worker, which gives it back
        given_back = wait_for_key.message("given back")
        with frail.rival() as rival:
            rival.execute(
                "INSERT INTO processed_messages VALUES ('wait_for_key', %s, 'rival', '', 1, NULL)",
                (given_back.message_id,),
            )
            frail.send(given_back)
            eventually(lambda: hand_of(frail))
            frail.redis.save()
            frail.send(bodies.write.message("runs"))
            eventually(lambda: bodies.begun)

            # When Redis comes back as it was then, while the worker is busy
            let_redis_crash(frail)
        in_hand = {redis_id.decode() for redis_id in hand_of(frail)}
        assert in_hand == {f"owed-0-12-wait_for_key{given_back.message_id}"}
        bodies.free.set()

        # Then the worker finds out that it does not have it
        eventually(lambda: frail.effects() == ["given back", "runs"], FOUND_S, what=frail.rows)
        frail.expect_settled()


def test_a_postgresql_that_is_restored_to_an_earlier_moment_does_again_what_is_owed_again_i7(
    frail: LedgerStage, bodies: Bodies
) -> None:
    """Restored by writing back a copy of the tables, after all sessions were ended."""
    tables = ("effects", "processed_messages", "outbox_messages", "dead_letters")
    with frail.relay(), frail.worker(threads=2):
        # Given a copy of the tables, with messages that are done, running, waiting and not yet due
        bodies.free.set()
        send_many(frail, bodies.write, 2)
        frail.expect_settled()
        bodies.free.clear()
        send_many(frail, bodies.write, 6, load="again")
        frail.send(bodies.write.message("later"), delay=2_000)
        eventually(lambda: len(bodies.begun) == 4 and len(under_way(frail)) == 6)
        for table in tables:
            frail.sql(f"CREATE TABLE copy_of_{table} AS TABLE {table}")
        bodies.free.set()
        frail.expect_settled()
        done = frail.effects()

        # When they are written back
        frail.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        frail.sql(
            f"BEGIN; LOCK {', '.join(tables)}; TRUNCATE {', '.join(tables)};"
            + "".join(f"INSERT INTO {table} TABLE copy_of_{table};" for table in tables)
            + "COMMIT"
        )
        assert frail.effects() == ["0", "1"]

        # Then what was owed then is done again, once
        eventually(lambda: frail.effects() == done, FOUND_S, what=frail.rows)
        frail.expect_settled()
    assert frail.effects() == done == sorted(["0", "1", *map(str, range(6)), "later"])


def test_a_backlog_that_is_well_is_not_published_again_however_old_it_is(
    ledger: LedgerStage, write: Actor[..., Any], relay: Relay
) -> None:
    # Given messages that have waited in Redis for an hour
    sent = send_many(ledger, write, 50)
    relay.publish()
    ledger.sql("UPDATE outbox_messages SET published_at = published_at - interval '1 hour'")

    # When they are looked for, then nothing is wrong with them
    assert relay.audit() == 0
    assert relay.publish() == 0
    assert in_queue(ledger) == sent


def test_what_was_published_a_moment_ago_is_not_missed_yet(
    ledger: LedgerStage, write: Actor[..., Any], relay: Relay
) -> None:
    # Given rows that are marked and not in Redis, one of them for longer than a moment
    old, _ = send_many(ledger, write, 2)
    ledger.sql("UPDATE outbox_messages SET published_at = clock_timestamp()")
    ledger.sql("UPDATE outbox_messages SET published_at = now() - interval '2 s' WHERE message_id = %s", old)

    # When they are looked for, then that one is missed: the other may be on its way this moment
    assert relay.audit() == 1
    assert [row.message_id for row in ledger.rows() if not row.published] == [old]


def test_a_lost_row_that_a_running_claim_has_deleted_is_passed_over_t38(
    ledger: LedgerStage, write: Actor[..., Any], relay: Relay
) -> None:
    # Given two rows that Redis has lost, one of which is being performed
    running, other = send_many(ledger, write, 2)
    ledger.sql("UPDATE outbox_messages SET published_at = now() - interval '1 hour'")
    with ledger.rival() as rival:
        rival.execute("DELETE FROM outbox_messages WHERE message_id = %s", (running,))

        # When they are looked for, then nobody waits, and the other is published again
        began_s = monotonic()
        assert relay.audit() == 1
        assert monotonic() - began_s < 0.3  # lock_timeout
        assert [row.message_id for row in ledger.rows() if not row.published] == [other]


@pytest.mark.parametrize("key", ["other", "other.msgs"])
def test_a_queue_that_cannot_be_audited_does_not_stop_the_others(
    ledger: LedgerStage, write: Actor[..., Any], relay: Relay, key: str
) -> None:
    # Given rows of two queues that Redis has lost, and a wrong type under a key of the first
    @ledger.actor(queue_name="other")
    def other(label: str) -> None:
        ledger.effect(label)

    ledger.send(other.message("a"))
    sent = ledger.send(write.message("b"))
    relay.publish()
    ledger.redis.flushall()
    ledger.redis.set(f"stage:{key}", "somebody else's")
    ledger.sql("UPDATE outbox_messages SET published_at = published_at - interval '1 hour'")

    # When they are looked for, then the other queue is mended
    assert relay.audit() >= 1
    relay.publish()
    assert in_queue(ledger) == [sent.message_id]
