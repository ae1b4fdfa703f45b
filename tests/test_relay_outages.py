"""A relay that is killed, stopped or cut off loses nothing and holds up nobody."""

from __future__ import annotations

import os
from signal import SIGCONT, SIGSTOP, SIGTERM
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from .lossy_proxy import LossyProxy
from .processes import eventually
from .relays import HoldingProxy, in_queue, send_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dramatiq import Actor

    from .ledger_stage import LedgerStage
    from .relays import RelayProcess

    StartRelay = Callable[..., RelayProcess]

pytest_plugins = ("tests.ledger_stage", "tests.relay_fixtures")

#: "For no more than a few seconds": a round of the audit, and what a busy machine takes.
FEW_S = 8


@pytest.fixture
def way_to_redis(ledger: LedgerStage) -> Iterator[HoldingProxy]:
    with HoldingProxy(ledger.servers.redis.url) as proxy:
        yield proxy


@pytest.fixture
def marked(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay, way_to_redis: HoldingProxy
) -> tuple[RelayProcess, str]:
    """A relay that has marked a row and not published it, and the id of its message."""
    relay = relay_beside(ledger, redis=way_to_redis.url)
    way_to_redis.hold_question_with(b"owed-0-")
    sent = ledger.send(write.message("a"))
    assert way_to_redis.held.wait(10)
    assert ledger.row().published
    assert ledger.in_redis() == []
    return relay, sent.message_id


@pytest.mark.parametrize("end", ["killed", "stopped"])
@pytest.mark.parametrize("other", ["relay", "worker"])
def test_what_a_relay_marked_and_did_not_publish_is_published_by_another(
    ledger: LedgerStage,
    relay_beside: StartRelay,
    marked: tuple[RelayProcess, str],
    end: str,
    other: str,
) -> None:
    # Given a relay that ends between its mark and its publish
    relay, message_id = marked
    if end == "killed":
        relay.kill()
    else:
        relay.signal(SIGSTOP)

    # When there is another, or only a worker
    if other == "relay":
        relay_beside(ledger)
        # Then that publishes the row
        eventually(lambda: ledger.in_redis() == [message_id], FEW_S, what=ledger.rows)
    else:
        with ledger.worker():
            ledger.expect_settled(FEW_S)
        assert ledger.effects() == ["a"]


def test_a_stopped_relay_that_goes_on_later_doubles_nothing(
    ledger: LedgerStage, marked: tuple[RelayProcess, str], way_to_redis: HoldingProxy
) -> None:
    # Given a relay that is stopped between its mark and its publish
    relay, _ = marked
    relay.signal(SIGSTOP)

    with ledger.worker():
        # When the message was published by another and performed meanwhile
        ledger.expect_settled(FEW_S)

        # And the relay goes on
        way_to_redis.release()
        relay.signal(SIGCONT)

        # Then the message comes again, and changes nothing
        eventually(lambda: len(ledger.witness.seen) == 2)
        ledger.expect_settled()
    assert ledger.effects() == ["a"]
    assert relay.returncode is None


def test_a_publish_whose_answer_was_lost_is_repeated_without_harm(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay, way_to_redis: HoldingProxy
) -> None:
    # Given a relay that does not hear that Redis took the row
    relay = relay_beside(ledger, redis=way_to_redis.url)
    way_to_redis.lose_answer_with(b"$2\r\nok\r\n")
    sent = ledger.send(write.message("a"))
    assert way_to_redis.lost.wait(10)

    # When it has asked again
    eventually(lambda: "can be used again" in relay.output(), what=relay.output)
    eventually(lambda: ledger.row().published)

    # Then the message is in Redis once
    assert in_queue(ledger) == [sent.message_id]


@pytest.mark.parametrize("lost", ["question", "answer"])
def test_a_mark_whose_connection_broke_loses_nothing(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay, lost: Any
) -> None:
    # Given a relay whose connection to PostgreSQL breaks when it marks rows
    with LossyProxy(ledger.servers.postgres.url) as proxy:
        relay = relay_beside(ledger, postgres=proxy.address)
        proxy.lose(lost, "SET published_at = now()")
        sent = ledger.send(write.message("a"))
        eventually(lambda: proxy.losses == 1)

        # Then it connects again, and the row is published soon
        eventually(lambda: ledger.in_redis() == [sent.message_id], FEW_S, what=relay.output)


def test_a_relay_that_is_cut_off_while_it_receives_rows_holds_up_nobody_t38(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay
) -> None:
    # Given more bytes than the sockets between PostgreSQL and a relay hold
    send_many(ledger, write, 400, "x" * 40_000)
    with LossyProxy(ledger.servers.postgres.url) as proxy, HoldingProxy(proxy.address) as way:
        # And a relay that gets the beginning of its rows and then nothing more, as one that is stopped
        way.answer_limit_bytes = 500_000
        port = str(urlsplit(proxy.address).port)
        relay_beside(ledger, postgres=proxy.address.replace(port, str(way.port)))
        assert way.held.wait(10)

        # When there is another
        relay_beside(ledger)

        # Then that publishes them
        eventually(lambda: ledger.redis.hlen("stage:default.msgs") == 400, 2 * FEW_S)


@pytest.mark.parametrize("away", ["redis", "postgres", "both"])
def test_a_relay_goes_on_by_itself_when_a_server_is_back(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay, away: str
) -> None:
    # Given a relay whose server goes away, with rows that are due
    relay = relay_beside(ledger)
    first = ledger.send(write.message("a"), delay=500)
    servers = [getattr(ledger.servers, name) for name in ("redis", "postgres") if away in (name, "both")]
    for server in servers:
        server.stop()
    ledger.hang_up()
    eventually(lambda: "cannot be used" in relay.output(), what=relay.output)
    gone_s = monotonic() + 2
    eventually(lambda: monotonic() > gone_s)

    # When it is back
    assert relay.returncode is None, relay.output()
    for server in servers:
        server.start()

    # Then the relay publishes what was due, and what comes after it
    second = ledger.send(write.message("b"))
    both = sorted([first.message_id, second.message_id])
    eventually(lambda: ledger.in_redis() == both, what=lambda: (ledger.rows(), relay.output()))
    assert all(row.published and row.refused is None for row in ledger.rows())


@pytest.mark.parametrize("away", ["redis", "postgres"])
def test_a_relay_can_be_ended_while_a_server_is_away(
    ledger: LedgerStage, relay_beside: StartRelay, away: str
) -> None:
    # Given a relay whose server is away
    relay = relay_beside(ledger)
    getattr(ledger.servers, away).stop()
    ledger.hang_up()
    eventually(lambda: "cannot be used" in relay.output(), what=relay.output)

    # When it is asked to end
    relay.signal(SIGTERM)

    # Then it does, and well
    assert relay.wait() == 0, relay.output()


def test_a_relay_can_be_ended_while_postgresql_is_frozen(
    ledger: LedgerStage, relay_beside: StartRelay
) -> None:
    # Given a relay whose session in PostgreSQL answers nothing
    relay = relay_beside(ledger)
    ((backend,),) = ledger.sql("SELECT pid FROM pg_stat_activity WHERE application_name = %s", relay.name)
    os.kill(backend, SIGSTOP)
    try:
        # When it is asked to end, then it does, and well
        relay.signal(SIGTERM)
        assert relay.wait() == 0
    finally:
        os.kill(backend, SIGCONT)


def test_a_redis_that_hangs_does_not_make_a_relay_lose_rows(
    ledger: LedgerStage, write: Actor[..., Any], relay_beside: StartRelay
) -> None:
    # Given a relay, and a Redis that answers nobody
    relay = relay_beside(ledger)
    ledger.redis.client_pause(6_000, all=False)
    sent = ledger.send(write.message("a"))
    eventually(lambda: "cannot be used" in relay.output(), what=relay.output)

    # When it answers again
    ledger.redis.client_unpause()

    # Then the row is published once
    eventually(lambda: in_queue(ledger) == [sent.message_id], what=ledger.rows)
