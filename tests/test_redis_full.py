"""A Redis that is full, and one that may not be: it drains by itself, and nothing is lost (T33)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dramatiq.errors import BrokerConnectionError

from .processes import eventually
from .relays import ForgetfulValkey, in_queue, send_many

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.ledger_stage", "tests.relay_fixtures")

#: What may be stored beside what an empty server needs: for some dozens of the messages below.
ROOM_BYTES = 2 << 20
LOAD = "x" * 20_000


@pytest.fixture
def small(frail: LedgerStage) -> LedgerStage:
    """A stage whose Redis is full before long, and then refuses to store anything."""
    limit_memory(frail, ROOM_BYTES)
    return frail


def limit_memory(stage: LedgerStage, room_bytes: int) -> None:
    client: Any = stage.redis
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", used + room_bytes)


def fill(stage: LedgerStage) -> None:
    """Let somebody else's data take all the room."""
    client: Any = stage.redis
    client.config_set("maxmemory", 0)
    client.setrange("somebody else's", ROOM_BYTES, "x")  # made by the server, not sent to it
    limit_memory(stage, -ROOM_BYTES // 2)


def make_room(stage: LedgerStage) -> None:
    """Take what `fill` stored away."""
    stage.redis.delete("somebody else's")


def writer(stage: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is its label."""

    @stage.actor()
    def write(label: str, load: str = "") -> None:
        stage.effect(label)

    return write


def tried(stage: LedgerStage, times: int) -> None:
    """Wait until somebody has tried so often to publish: each begins by looking at the window."""
    client: Any = stage.redis

    def tries() -> int:
        return int(client.info("commandstats").get("cmdstat_hlen", {"calls": 0})["calls"])

    before = tries()
    eventually(lambda: tries() >= before + times)


def test_a_full_redis_drains_by_itself(small: LedgerStage) -> None:
    write = writer(small)
    # Given more than Redis can hold, and no worker
    with small.relay():
        send_many(small, write, 300, LOAD)
        eventually(lambda: in_queue(small))
        tried(small, 3)
        assert 0 < len(in_queue(small)) < 300
        limit_memory(small, -ROOM_BYTES // 4)  # far more than full, so that nothing can be written at all

        # When a worker comes
        with small.worker():
            # Then it can fetch and acknowledge, and all else follows
            small.expect_settled(60)

    # And each has taken effect once; nothing was given up
    assert small.effects() == sorted(str(number) for number in range(300))
    assert small.letters() == []


def test_a_redis_that_is_full_when_it_starts_drains_by_itself(small: LedgerStage) -> None:
    """It knows none of our scripts then, and must take them."""
    write = writer(small)
    client: Any = small.redis
    with small.relay():
        # Given a full Redis that comes back as it was, but without our scripts
        send_many(small, write, 200, LOAD)
        eventually(lambda: in_queue(small))
        tried(small, 3)
        client.save()
        redis = small.servers.redis
        assert isinstance(redis, ForgetfulValkey)
        redis.options = ("--maxmemory", str(client.config_get("maxmemory")["maxmemory"]))
        redis.crash()
        assert len(in_queue(small)) > 50

        # When a worker comes, then everything follows
        with small.worker():
            small.expect_settled(60)
    assert small.effects() == sorted(str(number) for number in range(200))


def test_what_a_full_redis_refuses_stays_due_and_is_not_set_aside(small: LedgerStage) -> None:
    write = writer(small)
    # Given a Redis that somebody else has filled
    fill(small)
    with small.relay():
        # When a message is sent
        sent = small.send(write.message("a"))
        tried(small, 3)

        # Then it waits
        assert in_queue(small) == []

        # And when there is room again, it is published
        make_room(small)
        eventually(lambda: in_queue(small) == [sent.message_id], what=small.rows)
    assert small.row().refused is None


def test_a_message_that_does_not_fit_holds_up_no_smaller_one(small: LedgerStage) -> None:
    write = writer(small)
    # Given room for small messages only
    client: Any = small.redis
    limit_memory(small, 600_000)
    with small.relay():
        # When a large one is due before them
        small.send(write.message("large", "x" * 900_000))
        send_many(small, write, 5)

        # Then these are published
        eventually(lambda: client.llen("stage:default") == 5, what=small.rows)


def test_a_full_redis_refuses_what_is_sent_outside_and_takes_nothing_from_what_is_sent_inside(
    small: LedgerStage,
) -> None:
    write = writer(small)
    # Given a full Redis
    fill(small)

    # When messages are sent, then outside a transaction the sender hears of it
    with pytest.raises(BrokerConnectionError):
        write.send("outside")

    # And inside one it need not
    sent = small.send(write.message("inside"))
    assert small.owed() == [sent.message_id]


def test_a_body_that_fails_while_redis_is_full_is_retried_from_its_row(small: LedgerStage) -> None:
    # Given a message in a Redis that becomes full then, whose body fails at first
    tries: list[str] = []

    @small.actor(max_retries=1, min_backoff=20, max_backoff=20)
    def fail_once(label: str) -> None:
        small.effect(label)
        tries.append(label)
        if len(tries) == 1:
            fill(small)
            raise ValueError("no")

    # When it is performed
    with small.worker_and_relay():
        small.send(fail_once.message("a"))

        # Then its retry waits as a row, and Redis has nothing of it
        eventually(lambda: [row.attempt for row in small.rows()] == [1], what=small.rows)
        eventually(lambda: not small.in_redis())

        # And does the work when there is room again
        make_room(small)
        small.expect_settled()
    assert small.effects() == ["a"]
    assert tries == ["a", "a"]


@pytest.mark.parametrize("window", [1, 7])
def test_no_more_messages_of_a_queue_are_in_redis_than_redis_window(
    ledger_with: Callable[..., LedgerStage], window: int
) -> None:
    # Given a small window, and two relays beside the one of a worker
    ledger = ledger_with(broker={"redis_window": window})
    assert ledger.broker.redis_window == window
    client: Any = ledger.redis
    seen: list[int] = []

    @ledger.actor()
    def write(label: str, load: str = "") -> None:
        seen.append(client.hlen("stage:default.msgs"))
        ledger.effect(label)

    with ledger.relay(), ledger.relay():
        # When there is more to publish
        send_many(ledger, write, 20)

        # Then Redis has so many, the others wait in PostgreSQL
        eventually(lambda: client.hlen("stage:default.msgs") == window)
        eventually(lambda: sum(row.published for row in ledger.rows()) == window, what=ledger.rows)

        # And they follow in order of their due time as there is room
        with ledger.worker():
            ledger.expect_settled(30)
    assert len(ledger.effects()) == 20
    assert max(seen) <= window


def test_a_queue_that_has_enough_in_redis_holds_up_no_other(ledger_with: Callable[..., LedgerStage]) -> None:
    # Given more rows of a full queue than a relay takes in one round
    ledger = ledger_with(broker={"redis_window": 10})

    @ledger.actor()
    def write(label: str, load: str = "") -> None:
        ledger.effect(label)

    @ledger.actor(queue_name="other")
    def other(label: str) -> None:
        ledger.effect(label)

    send_many(ledger, write, 1_500)

    # When a row of another queue is due after all of them
    with ledger.relay():
        sent = ledger.send(other.message("a"))

        # Then it is published
        eventually(lambda: in_queue(ledger, "other") == [sent.message_id])
    assert len(in_queue(ledger)) == 10
