"""Workers are killed at every hook of what sets something off, and of what is set off (I5, T10, T24, T25)."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import Message, group, pipeline

from middleware.relay import Relay
from models import database

from .faults.chained_actors import broker, give, outside, take
from .faults.signals import signals
from .processes import Kind, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .faults.crew import Crew
    from .faults.shop import Shop

pytest_plugins = ("tests.faults.fixtures",)

MODULE = "tests.faults.chained_actors:broker"
POINTS = ("begin", "body", "processed", "ack", "acked")


@contextmanager
def a_relay() -> Iterator[None]:
    """A relay of this process: what is owed leaves at once."""
    over = Event()
    assert broker.ledger is not None
    relay = Relay(broker, broker.ledger)

    def run() -> None:
        relay.run(over)
        database.close()

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        database.close()


@pytest.mark.parametrize("kind", ["threads", "gevent"])
def test_killed_at_every_hook_and_delivered_three_times_each_step_is_done_once_t10_t24_t25(
    kind: Kind, shop: Shop, crew: Crew
) -> None:
    # Given a group of pipelines with callbacks, and for each hook one at whose last step a worker will be
    # killed there; also at a callback, and at the completion
    chains: list[Any] = []
    for point in POINTS:
        labels = f"take-{point}", f"give-{point}"
        signals.set(f"kill-{point}-{labels[1]}")
        steps = take.message(labels[0]), outside.message(f"out-{point}"), give.message(labels[1])
        chains.append(pipeline(steps, broker=broker))
    signals.set("kill-processed-cheer-take-ack")
    signals.set("kill-processed-take-body")
    whole = group(chains, broker=broker)
    whole.add_completion_callback(give.message("done"))
    signals.set("kill-ack-done")

    # When it is run, and all first steps come twice more
    with a_relay():
        whole.run()
        for (raw,) in rows("SELECT message FROM outbox_messages"):
            for _ in range(2):
                broker.enqueue(Message.decode(bytes(raw)))

        def is_settled() -> bool:
            """Look; a worker that was killed is replaced."""
            while sum(worker.returncode is None for worker in crew.workers) < 2:
                crew.start(ready=False, kind=kind, heartbeat_ms=1_000, module=MODULE)
            return not (
                shop.sql("SELECT count(*) FROM outbox_messages")
                or shop.redis.hlen("chained:default.msgs")
                or list(signals.folder.glob("kill-*"))
            )

        eventually(
            is_settled, 100, what=lambda: (list(signals.folder.glob("kill-*")), crew.output()[-3_000:])
        )

    # Then every step was done once, with the result of the one before, and so was what follows
    found = [customer for (customer,) in rows("SELECT customer FROM orders ORDER BY id")]
    expected = [
        text
        for point in POINTS
        for text in (
            f"take-{point}",
            f"cheer-take-{point} of take-{point}",
            f"give-{point} of take-{point} and outside",
        )
    ]
    assert sorted(found) == sorted([*expected, "done nobody"])
    # And the completion after the last member
    assert max(found.index(text) for text in expected if text.startswith("give")) < found.index("done nobody")
    assert rows("SELECT waiting FROM barriers") == [(0,)]
    assert rows("SELECT count(*) FROM dead_letters") == [(0,)]


def rows(query: str) -> list[tuple[Any, ...]]:
    """The rows of an answer."""
    try:
        return list(database.execute_sql(query).fetchall())
    finally:
        database.close()
