"""A relay as a process: it is quick, cheap, ends well, and a worker can do without it."""

from __future__ import annotations

from signal import SIGCONT, SIGINT, SIGSTOP, SIGTERM
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

from models import Order, OrderState, Stock, database

from .processes import eventually
from .relays import send_many

if TYPE_CHECKING:
    from collections.abc import Callable
    from signal import Signals

    from dramatiq import Actor

    from .ledger_stage import LedgerStage
    from .payment_service import PaymentService
    from .processes import Kind, WorkerProcess
    from .relays import RelayProcess
    from .servers import Servers

    StartRelay = Callable[..., RelayProcess]

pytest_plugins = ("tests.ledger_stage", "tests.payment_service", "tests.relay_fixtures")


def test_a_committed_row_is_in_redis_soon(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay
) -> None:
    # Given a relay that has nothing to do
    relay_beside(ledger)

    # When transactions commit, one after the other
    took_s = []
    for number in range(1, 21):
        began_s = monotonic()
        ledger.send(write.message(str(number)))
        while ledger.redis.llen("stage:default") < number and monotonic() < began_s + 5:
            pass
        took_s.append(monotonic() - began_s)

    # Then half of them have not waited for the relay to look by itself
    assert sorted(took_s)[10] < 0.125


@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_a_relay_ends_well_with_the_round_it_is_in(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay, number: Signals
) -> None:
    # Given a relay in the middle of many rows
    send_many(ledger, write, 3_000)
    relay = relay_beside(ledger)
    eventually(ledger.in_redis)

    # When it is asked to end
    relay.signal(number)

    # Then it does, and what it has marked it has published
    assert relay.wait() == 0
    assert sorted(row.message_id for row in ledger.rows() if row.published) == ledger.in_redis()
    assert "Traceback" not in relay.output()


def test_no_session_of_a_relay_is_idle_in_a_transaction(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay
) -> None:
    # Given a relay
    relay = relay_beside(ledger)

    # When it is stopped again and again, while rows are due
    seen = []
    for _ in range(30):
        send_many(ledger, write, 20)
        relay.signal(SIGSTOP)
        seen.append(relay.sessions("state LIKE 'idle in transaction%%'"))
        relay.signal(SIGCONT)

    # Then it was never between two statements of a transaction
    eventually(lambda: len(ledger.in_redis()) == 600)
    assert sum(seen) == 0


def test_an_idle_relay_uses_hardly_any_cpu(ledger: LedgerStage, relay_beside: StartRelay) -> None:
    """Less than 1 % on a quiet machine; the bound here is generous, since tests share theirs."""
    # Given a relay that has nothing to do
    relay = relay_beside(ledger)
    began_s, used_s = monotonic(), relay.cpu_s()

    # When some time has passed
    eventually(lambda: monotonic() > began_s + 4)

    # Then little of it was spent
    assert (relay.cpu_s() - used_s) / (monotonic() - began_s) < 0.05


def test_without_a_relay_a_worker_publishes_what_has_been_due_for_a_second(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a worker whose threads are busy, and no relay
    with ledger.worker(threads=1), ledger.rival() as rival:
        rival.execute("LOCK TABLE processed_messages")
        sent = ledger.send(write.message("a"))

        # When its message is in Redis
        eventually(lambda: ledger.in_redis() == [sent.message_id], 5)

        # Then it was due for a second, so that a relay would have come first
        assert ledger.row().due_in_s < -1
        rival.connection.rollback()
        ledger.expect_settled()


@pytest.mark.parametrize("kind", ["threads", "gevent"])
def test_without_a_relay_every_step_of_an_order_moves(
    clean: Servers, service: PaymentService, worker_process: Callable[..., WorkerProcess], kind: Kind
) -> None:
    from actors import fulfil

    # Given the application's worker, and no relay
    worker = worker_process(kind=kind)

    # When an order is placed
    with database.atomic():
        Stock.create(sku="SKU-1", quantity=5)
        order = Order.create(sku="SKU-1", quantity=2, customer="Ada")
        fulfil(order.id)

    # Then it is reserved, paid and shipped, by messages of the ledger
    eventually(lambda: Order.get().state == OrderState.SHIPPED, 20, what=worker.output)
    database.close()
