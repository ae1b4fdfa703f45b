"""Effects outside the database: the body comes before the transaction, with a key for the other side."""

from __future__ import annotations

from threading import Barrier, Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import group, pipeline
from dramatiq.middleware import Shutdown

from middleware import dead_letters, idempotency_key
from middleware.errors import ConfigurationError, NotExternal, SentInsideTransaction, WaitInsideTransaction

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Actor

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


def external(ledger: LedgerStage, **options: Any) -> Callable[[Callable[..., Any]], Actor[..., Any]]:
    return ledger.actor(**{"idempotency": "external", "min_backoff": 10, "max_backoff": 20, **options})


@pytest.fixture
def note(ledger: LedgerStage) -> Actor[..., Any]:
    """An ordinary actor whose effect is a label."""

    @ledger.actor()
    def note(label: str, *_before: Any) -> None:
        ledger.effect(label)

    return note


# The key


def test_the_key_is_the_same_in_every_attempt_and_another_for_another_label(ledger: LedgerStage) -> None:
    # Given a body that fails twice, and for good
    keys: list[tuple[str, str]] = []

    @external(ledger, max_retries=2)
    def charge() -> None:
        keys.append((idempotency_key("charge"), idempotency_key("fee")))
        if len(keys) < 5:
            raise ValueError("not yet")

    with ledger.worker_and_relay():
        ledger.send(charge.message())
        eventually(ledger.letters)
        ledger.expect_settled()

        # When its dead letter is requeued
        assert ledger.broker.ledger is not None
        dead_letters.requeue(ledger.broker.ledger, *dead_letters.newest(ledger.broker.ledger, 1))
        eventually(ledger.done)
        ledger.expect_settled()

    # Then all attempts had one key for each label
    assert len(keys) == 5
    ((charged, fee),) = set(keys)
    assert charged != fee
    for key in (charged, fee):
        assert key.isascii()
        assert 16 <= len(key) <= 64


def test_other_messages_and_consumers_have_other_keys_but_not_a_business_key_s_messages(
    ledger: LedgerStage,
) -> None:
    # Given two actors with outside effects, one of which fails at first
    keys: dict[str, str] = {}

    @external(ledger, throws=ValueError)
    def charge(name: str, same: str = "") -> None:
        keys[name] = idempotency_key("charge")
        if name == "c":
            raise ValueError("no")

    @external(ledger)
    def refund(name: str) -> None:
        keys[name] = idempotency_key("charge")

    # When messages are performed, the last two under one business key
    with ledger.worker_and_relay():
        ledger.send(charge.message("a"))
        ledger.send(charge.message("b"))
        ledger.send(refund.message("r"))
        for name in "cd":
            ledger.send(charge.message_with_options(args=(name,), idempotency_key="order-1"))
            eventually(lambda name=name: name in keys)  # type: ignore[misc] # mypy infers no default
            eventually(lambda: not ledger.rows())

    # Then only these share their key
    assert keys["c"] == keys["d"]
    assert len(set(keys.values())) == 4


def test_the_key_can_be_had_only_in_the_body_of_such_an_actor(ledger: LedgerStage) -> None:
    # Given other places
    raised: dict[str, BaseException] = {}

    def ask(place: str) -> None:
        try:
            idempotency_key("x")
        except NotExternal as error:
            raised[place] = error

    @ledger.actor()
    def ordinary() -> None:
        ask("transaction")

    @ledger.actor(idempotency="off")
    def free() -> None:
        ask("off")

    @external(ledger)
    def outside() -> None:
        thread = Thread(target=ask, args=("thread",))
        thread.start()
        thread.join()

    # When it is asked for there
    ask("nowhere")
    with ledger.worker_and_relay():
        for actor in (ordinary, free, outside):
            ledger.send(actor.message())
        ledger.expect_settled()

    # Then that raises, and says what to do
    assert set(raised) == {"transaction", "off", "thread", "nowhere"}
    assert all('idempotency="external"' in str(error) for error in raised.values())


# The transaction after the body


def test_two_deliveries_that_meet_run_the_body_twice_and_everything_else_once(
    ledger: LedgerStage, note: Actor[..., Any]
) -> None:
    # Given a body that waits for its twin
    meeting, keys = Barrier(2), list[str]()

    @external(ledger)
    def charge() -> str:
        keys.append(idempotency_key("charge"))
        meeting.wait(10)
        note.send("sent")
        return "receipt"

    # When a message is delivered twice at once
    with ledger.worker_and_relay(threads=2):
        chain = pipeline([charge.message(), note.message("next")], broker=ledger.broker)
        for _ in range(2):
            ledger.broker.enqueue(chain.messages[0])
        eventually(lambda: len(ledger.seen("returned")) >= 4)
        ledger.expect_settled()

    # Then both had the same key, and what was sent and what followed left once
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert ledger.effects() == ["next", "sent"]


def test_a_committed_key_is_answered_without_the_body(ledger: LedgerStage) -> None:
    # Given a message that was performed
    runs: list[int] = []

    @external(ledger)
    def charge() -> None:
        runs.append(1)

    with ledger.worker_and_relay():
        message = ledger.send(charge.message())
        ledger.expect_settled()

        # When it comes again
        ledger.broker.enqueue(message)
        eventually(lambda: len(ledger.seen("returned")) == 2)
        ledger.expect_settled()

    # Then its body has run once
    assert len(runs) == 1


def test_what_a_body_sends_leaves_with_its_key_and_not_when_it_fails(
    ledger: LedgerStage, note: Actor[..., Any]
) -> None:
    # Given a body that sends, also a group, and fails at first
    runs: list[int] = []
    members = [note.message("a"), note.message("b")]
    done = note.message("done")

    @external(ledger)
    def charge() -> None:
        runs.append(1)
        note.send(f"run {len(runs)}")
        whole = group(members, broker=ledger.broker)
        whole.add_completion_callback(done)
        whole.run()
        assert "note" not in {row.actor_name for row in ledger.rows()}
        if len(runs) == 1:
            raise ValueError("not yet")

    # When it is performed
    with ledger.worker_and_relay():
        charge.send()
        eventually(lambda: "done" in ledger.effects())
        ledger.expect_settled()

    # Then only what the second attempt sent has left
    assert ledger.effects() == ["a", "b", "done", "run 2"]


def test_sending_inside_a_transaction_of_the_bodys_own_is_refused(
    ledger: LedgerStage, note: Actor[..., Any]
) -> None:
    # Given a body that sends inside a transaction of its own
    @external(ledger)
    def charge() -> None:
        with ledger.database.atomic():
            note.send("inside")

    # When it is performed
    with ledger.worker_and_relay():
        charge.send()
        eventually(ledger.letters)
        ledger.expect_settled()

    # Then it is a dead letter that says so, and nothing has left
    assert ledger.letter().error_class == SentInsideTransaction.__name__
    assert ledger.effects() == []


def test_waiting_for_what_the_body_has_sent_raises_at_once(
    ledger: LedgerStage, note: Actor[..., Any]
) -> None:
    # Given results, and a body that waits for what it sends
    backend = ledger.keep_results()
    raised: list[BaseException] = []

    @external(ledger)
    def charge() -> None:
        try:
            note.send("late").get_result(backend=backend, block=True, timeout=60_000)
        except WaitInsideTransaction as error:
            raised.append(error)

    # When it is performed, then that is refused, and the message leaves all the same
    with ledger.worker_and_relay():
        charge.send()
        eventually(lambda: ledger.effects() == ["late"])
        ledger.expect_settled()
    assert len(raised) == 1


def test_a_transaction_that_a_body_left_open_is_not_taken_along_t4(ledger: LedgerStage) -> None:
    # Given a body that leaves a transaction open on the connection
    @external(ledger)
    def charge() -> None:
        ledger.database.begin()
        ledger.effect("left open")

    # When it is performed
    with ledger.worker_and_relay():
        ledger.send(charge.message())
        ledger.expect_settled()

    # Then its leftovers were rolled back, and the key stands
    assert ledger.effects() == []
    assert len(ledger.done()) == 1


def test_trouble_of_the_server_in_a_body_costs_no_retry_i9(ledger: LedgerStage) -> None:
    # Given a body that has no retries, and at first loses its connection in a transaction of its own
    runs: list[int] = []

    @external(ledger, max_retries=0)
    def charge() -> None:
        runs.append(1)
        with ledger.database.atomic():
            (pid,) = ledger.database.execute_sql("SELECT pg_backend_pid()").fetchone()
            if len(runs) == 1:
                ledger.sql("SELECT pg_terminate_backend(%s, 10000)", pid)
            ledger.database.execute_sql("SELECT 1")

    # When it is performed
    with ledger.worker_and_relay(threads=1):
        ledger.send(charge.message())
        eventually(ledger.done)
        ledger.expect_settled()

    # Then it ran again, and there is no dead letter
    assert len(runs) == 2
    assert ledger.letters() == []


def test_a_body_that_is_stopped_with_its_worker_gives_back_its_message(ledger: LedgerStage) -> None:
    # Given a body that Dramatiq's Shutdown ends
    runs: list[int] = []

    @external(ledger, max_retries=0)
    def charge() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise Shutdown

    # When it is performed
    with ledger.worker_and_relay():
        ledger.send(charge.message())
        eventually(ledger.done)
        ledger.expect_settled()

    # Then it ran again, and no retry was spent
    assert len(runs) == 2
    assert ledger.letters() == []


def test_an_absent_database_after_the_body_does_not_run_it_again_i9(ledger: LedgerStage) -> None:
    # Given a body whose database goes away while it runs
    runs: list[int] = []
    begun, go_on = Event(), Event()

    @external(ledger, max_retries=0)
    def charge() -> None:
        runs.append(1)
        begun.set()
        assert go_on.wait(20)

    with ledger.worker():
        charge.send()
        assert begun.wait(10)
        ledger.hang_up()
        ledger.servers.postgres.stop()

        # When it has ended, and the database is back
        go_on.set()
        ledger.servers.postgres.start()
        eventually(ledger.done, 30)

    # Then it has run once
    assert len(runs) == 1


def test_an_async_actor_cannot_have_outside_effects_under_a_key_t8(ledger: LedgerStage) -> None:
    # Given an async function; when it is declared so; then that is refused
    with pytest.raises(ConfigurationError, match="is async"):

        @external(ledger)
        async def charge() -> None: ...
