"""How many messages a worker takes, in which order, in which encoding, and beside whom."""

from __future__ import annotations

import datetime as dt
import json
from functools import partial
from typing import TYPE_CHECKING

import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.encoder import PickleEncoder

from .faults.actors import NAMESPACE, sell, sell_elsewhere, sell_last
from .faults.signals import signals
from .processes import eventually

if TYPE_CHECKING:
    from .faults.crew import Crew
    from .faults.shop import Shop

pytest_plugins = ("tests.faults.fixtures",)


def exchanges(shop: Shop) -> int:
    """How often workers have asked Redis for anything."""
    return int(shop.redis.info("commandstats")["cmdstat_evalsha"]["calls"])


def has_asked_often_since(shop: Shop, asked: int) -> bool:
    return exchanges(shop) > asked + 30


def test_a_prefetch_of_one_is_obeyed_exactly(shop: Shop, crew: Crew) -> None:
    """The message that runs is counted, also where other threads have nothing to do."""
    # Given a worker of four threads that runs one message
    worker = crew.start(threads=4, env={"dramatiq_queue_prefetch": "1"})
    for label in ("a", "b", "c"):
        shop.hold("body", label)
        shop.send(label)
    for number, label in enumerate(("a", "b", "c"), start=1):
        eventually(partial(shop.runs, label), what=worker.output)

        # When it has asked Redis for other things many times
        asked = exchanges(shop)
        eventually(partial(has_asked_often_since, shop, asked), what=worker.output)

        # Then the others are still where they were
        assert list(shop.in_hand().values()) == [1]
        assert shop.waiting() == 3 - number
        shop.release("body", label)
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (3, 3, 3, 3)


def test_a_prefetch_with_room_leaves_nothing_waiting(shop: Shop, crew: Crew) -> None:
    """T40: also where there is less room than would be worth a fetch of its own."""
    # Given a worker that has room for one message
    worker = crew.start(threads=8, env={"dramatiq_queue_prefetch": "8"})
    labels = [f"{number}" for number in range(8)]
    for label in labels:
        shop.hold("body", label)
    for label in labels[:7]:
        shop.send(label)
    eventually(lambda: all(shop.runs(label) for label in labels[:7]), what=worker.output)

    # When one arrives
    shop.send(labels[7])

    # Then it is taken soon; 200 ms are meant, and a busy machine is forgiven some more
    eventually(lambda: shop.runs(labels[7]), 1, what=worker.output)


@pytest.mark.parametrize("messages", [1, 3])
def test_other_workers_leave_no_message_to_a_worker_that_has_no_room(
    messages: int, shop: Shop, crew: Crew
) -> None:
    """What one worker has no room for is taken by the other."""
    # Given a worker that has no room
    shop.hold("body", "running")
    crew.start(threads=1, env={"dramatiq_queue_prefetch": "1"})
    shop.send("running")
    eventually(lambda: shop.runs("running"), what=crew.output)

    # When messages arrive, and another worker
    labels = [f"{number}" for number in range(messages)]
    for label in labels:
        shop.send(label)
    crew.start()

    # Then that one has performed them
    eventually(lambda: shop.owed() == 1, what=crew.output)
    assert shop.books() == (messages, messages, messages, messages)


def test_priorities_are_kept(shop: Shop, crew: Crew) -> None:
    """Of what a worker has in memory the most urgent comes first."""
    # Given a busy worker that has fetched something urgent last
    shop.hold("body", "running")
    worker = crew.start(threads=1)
    shop.send("running")
    eventually(lambda: shop.runs("running"), what=worker.output)
    shop.send("later", actor=sell_last)
    eventually(lambda: list(shop.in_hand().values()) == [2], what=worker.output)
    shop.hold("body", "urgent")
    shop.send("urgent")
    eventually(lambda: list(shop.in_hand().values()) == [3], what=worker.output)

    # When its thread becomes free
    shop.release("body", "running")

    # Then the urgent message is next
    eventually(lambda: shop.runs("urgent"), what=worker.output)
    assert shop.runs("later") == 0
    shop.release("body", "urgent")
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (3, 3, 3, 3)


def test_a_message_may_be_encoded_with_pickle(shop: Shop, crew: Crew) -> None:
    """T17: also the retry, with arguments that JSON does not know."""
    # Given a worker that speaks pickle, and a message that will fail once
    worker = crew.start(module="tests.faults.pickled_actors:broker")
    signals.set("fail-2026-01-01")
    label = dt.date(2026, 1, 1)  # as a text it names the signal
    message = PickleEncoder().encode({**sell.message("").asdict(), "args": (label,)})

    # When it is delivered twice
    shop.place(message, message)
    eventually(lambda: shop.owed() == 0, what=worker.output)

    # Then it took effect once
    assert shop.books() == (1, 1, 1, 1)
    assert shop.dead() == []
    assert sorted(shop.retries("2026-01-01")) == [0, 0, 1]


def test_messages_that_cannot_be_worked_with_do_not_take_the_good_ones_of_their_fetch_along(
    shop: Shop, crew: Crew
) -> None:
    """T21: they are dead letters at once, and the others are performed."""
    # Given good and bad messages that are fetched together
    good = [sell.message(label) for label in ("first", "between", "last")]
    fields = sell.message("bad").asdict()
    bad = [
        b"\x00\xff not a message",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        encode(fields, options=None),
        encode(fields, options=[]),
        encode(fields, options={"max_retries": "three"}),
        encode(fields, options={"retries": "0"}),
        encode(fields, options={"time_limit": "soon"}),
        encode(fields, options={"max_age": {}}),
        encode(fields, args=None),
        encode(fields, kwargs=[]),
        encode(fields, actor_name=None),
        encode(fields, message_id=7),
        encode(fields, queue_name=["default"]),
    ]
    first, between, last = (message.encode() for message in good)
    worker = crew.start()

    # When they arrive
    shop.place(first, *bad[:8], between, *bad[8:], last)

    # Then the good ones have taken effect, and the bad ones are dead letters as they came
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (3, 3, 3, 3)
    assert sorted(shop.dead()) == sorted(bad)
    eventually(lambda: not any(shop.in_hand().values()), what=worker.output)


def encode(fields: dict[str, object], **changes: object) -> bytes:
    """A message as a stranger may have written it."""
    return json.dumps({**fields, **changes}).encode()


@pytest.fixture
def stock_broker(shop: Shop) -> RedisBroker:
    """Dramatiq's own broker on the same namespace, doing maintenance with every command."""
    return RedisBroker(
        url=shop.servers.redis.url,
        namespace=NAMESPACE,
        maintenance_chance=1_000_000,
        heartbeat_timeout=1_500,
        middleware=[],
    )


def test_a_stock_broker_enqueues_and_its_maintenance_does_no_harm(
    shop: Shop, crew: Crew, stock_broker: RedisBroker
) -> None:
    """It sees our beats, so it hands out nothing that a living worker has."""
    # Given a worker that is busy
    worker = crew.start(threads=1, heartbeat_ms=1_000)
    shop.hold("body", "running")
    shop.send("running")
    eventually(lambda: shop.runs("running"), what=worker.output)

    # When a stock broker enqueues, and does maintenance until the worker has beaten on
    for label in ("a", "b", "c"):
        stock_broker.enqueue(sell.message(label))
    (busy,) = shop.in_hand()
    begun_ms = shop.beats()[busy]
    eventually(lambda: stock_broker.do_qsize("default") and shop.beats()[busy] > begun_ms + 2_000)

    # Then all is performed, and what was running ran once
    shop.release("body", "running")
    eventually(lambda: shop.owed() == 0, what=worker.output)
    assert shop.books() == (4, 4, 4, 4)
    assert shop.runs("running") == 1
    assert shop.dead() == []


def test_the_maintenance_of_a_stock_broker_recovers_what_a_killed_worker_had(
    shop: Shop, crew: Crew, stock_broker: RedisBroker
) -> None:
    """The layout of keys is Dramatiq's."""
    # Given a worker that was killed with messages in hand
    worker = crew.start(threads=1, heartbeat_ms=1_000)
    shop.hold("body", "a")
    shop.send("a")
    shop.send("b")
    eventually(lambda: list(shop.in_hand().values()) == [2], what=worker.output)
    worker.kill()

    # When a stock broker does maintenance
    def recovered() -> bool:
        stock_broker.do_qsize("default")
        return shop.waiting() == 2

    # Then they are in the queue again
    eventually(recovered)
    assert not any(shop.in_hand().values())


def test_a_message_on_another_queue_is_performed_by_a_worker_of_that_queue(shop: Shop, crew: Crew) -> None:
    # Given two workers with a queue each, of which one is busy
    shop.hold("body", "running")
    crew.start(options=("--queues", "default"), threads=1)
    crew.start(options=("--queues", "elsewhere"), threads=1)
    shop.send("running")
    eventually(lambda: shop.runs("running"), what=crew.output)

    # When a message comes for each
    shop.send("here")
    shop.send("there", actor=sell_elsewhere)

    # Then one is performed and the other waits for its worker
    eventually(lambda: shop.orders("there") == 1, what=crew.output)
    assert shop.runs("here") == 0
