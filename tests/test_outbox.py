"""The one rule: sent inside a transaction, a message leaves with its commit; sent outside, at once."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import Actor, Message, Middleware, group, pipeline

from middleware.errors import InvalidKey

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")

#: Far enough away not to come while a test looks.
LATER_MS = 60_000


class ChangeOfMindError(Exception):
    """The application rolls its transaction back."""


def chain(ledger: LedgerStage, write: Actor[..., Any]) -> list[Message[Any]]:
    """Run a pipeline; only its first step is sent."""
    last = write.message_with_options(args=("b",), pipe_ignore=True)
    steps = pipeline([write.message("a"), last], broker=ledger.broker)
    steps.run()
    return steps.messages[:1]


def flock(ledger: LedgerStage, write: Actor[..., Any]) -> list[Message[Any]]:
    """Run a group without callbacks, with a pipeline among its members."""
    last = write.message_with_options(args=("c",), pipe_ignore=True)
    steps = pipeline([write.message("b"), last], broker=ledger.broker)
    member = write.message("a")
    group([member, steps], broker=ledger.broker).run()
    return [member, steps.messages[0]]


#: What Dramatiq has to send a message with; each returns what has to leave.
WAYS: dict[str, Callable[[LedgerStage, Actor[..., Any]], list[Message[Any]]]] = {
    "send": lambda _, write: [write.send("a")],
    "send_with_options": lambda _, write: [write.send_with_options(args=("a",), max_retries=1)],
    "business key": lambda _, write: [write.send_with_options(args=("a",), idempotency_key="order 1")],
    "enqueue": lambda ledger, write: [ledger.broker.enqueue(write.message("a"))],
    "pipeline": chain,
    "group": flock,
}
every_way = pytest.mark.parametrize("way", WAYS)


def ids(messages: list[Message[Any]]) -> list[str]:
    return sorted(message.message_id for message in messages)


def is_in_redis(ledger: LedgerStage, message: Message[Any]) -> bool:
    return message.message_id in ledger.in_redis()


@pytest.fixture
def write(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is its label."""

    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    return write


@every_way
def test_a_message_sent_inside_a_transaction_leaves_with_its_commit(
    ledger: LedgerStage, write: Actor[..., Any], way: str
) -> None:
    with ledger.relay():
        # Given a transaction with a change
        with ledger.database.atomic():
            ledger.effect("change")

            # When a message is sent in it
            sent = WAYS[way](ledger, write)

            # Then it is not under way as long as the change is not
            assert ledger.effects() == ledger.in_redis() == ledger.owed() == []

        # And afterwards it is, and owed until it is done
        eventually(lambda: ledger.in_redis() == ids(sent), what=ledger.rows)
        assert ledger.owed() == ids(sent)
        assert ledger.effects() == ["change"]

    # And it takes effect once
    with ledger.worker_and_relay():
        ledger.expect_settled()
    assert ledger.effects().count("a") == 1


@every_way
def test_a_message_sent_inside_a_transaction_does_not_leave_when_it_is_rolled_back_i7(
    ledger: LedgerStage, write: Actor[..., Any], way: str
) -> None:
    # Given a message that is sent in a transaction
    with suppress(ChangeOfMindError), ledger.database.atomic():
        WAYS[way](ledger, write)

        # When that is rolled back
        raise ChangeOfMindError

    # Then there is no trace of it
    assert ledger.rows() == []
    assert ledger.in_redis() == []


@every_way
def test_a_message_sent_outside_leaves_at_once(ledger: LedgerStage, write: Actor[..., Any], way: str) -> None:
    # When a message is sent outside any transaction
    sent = WAYS[way](ledger, write)

    # Then it is in Redis, and not owed: Dramatiq's own guarantee is enough for it
    assert ledger.in_redis() == ids(sent)
    assert ledger.rows() == []


#: The same with a delay.
DELAYED: dict[str, Callable[[LedgerStage, Actor[..., Any]], object]] = {
    "send_with_options": lambda _, write: write.send_with_options(args=("a",), delay=LATER_MS),
    "enqueue": lambda ledger, write: ledger.broker.enqueue(write.message("a"), delay=LATER_MS),
    "pipeline": lambda ledger, write: pipeline([write.message("a")], broker=ledger.broker).run(
        delay=LATER_MS
    ),
    "group": lambda ledger, write: group([write.message("a")], broker=ledger.broker).run(delay=LATER_MS),
}


@pytest.mark.parametrize("way", DELAYED)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_a_message_with_a_delay_waits_as_a_row_with_a_due_time(
    ledger: LedgerStage, write: Actor[..., Any], way: str, *, inside: bool
) -> None:
    # When a message is sent with a delay, wherever
    with ledger.relay():
        if inside:
            with ledger.database.atomic():
                DELAYED[way](ledger, write)
        else:
            DELAYED[way](ledger, write)

    # Then it waits in PostgreSQL, by the database's clock, and Redis knows nothing of it
    row = ledger.row()
    assert not row.published
    assert LATER_MS / 1_000 - 15 < row.due_in_s <= LATER_MS / 1_000
    assert "eta" not in row.message.options
    assert ledger.redis.keys("stage:default*") == []


def test_a_delay_that_is_over_lets_the_message_leave(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a worker and a relay, when a message is sent with a short delay
    with ledger.worker_and_relay():
        write.send_with_options(args=("a",), delay=100)

        # Then it takes effect, and is owed no longer
        eventually(ledger.effects)
        ledger.expect_settled()


def test_a_savepoint_that_is_rolled_back_takes_its_messages_along_i7(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a transaction with savepoints, of which two are rolled back
    with ledger.database.atomic():
        write.send("before")
        with suppress(ChangeOfMindError), ledger.database.atomic():
            write.send("undone by an error")
            with ledger.database.atomic():
                write.send("released, and undone with the outer one")
            raise ChangeOfMindError
        with ledger.database.atomic() as savepoint:
            write.send("undone by hand")
            savepoint.rollback()
            write.send("after the roll-back")
        with ledger.database.savepoint():
            write.send("kept")

    # When the transaction commits, and all that is owed is done
    with ledger.worker_and_relay():
        ledger.expect_settled()

    # Then what was sent in the others has left, and nothing else
    assert ledger.effects() == ["after the roll-back", "before", "kept"]


def in_a_session(ledger: LedgerStage) -> Any:
    """What peewee has for those who cannot use a block."""

    class Session:
        def __enter__(self) -> None:
            ledger.database.session_start()

        def __exit__(self, *_: object) -> None:
            ledger.database.session_commit()

    return Session()


@pytest.mark.parametrize(
    "begin",
    [
        lambda ledger: ledger.database.transaction(),
        lambda ledger: ledger.database.atomic("SERIALIZABLE"),
        lambda ledger: ledger.database,
        in_a_session,
    ],
    ids=["transaction", "atomic with a level", "with database", "session"],
)
def test_a_transaction_is_one_however_it_was_begun(
    ledger: LedgerStage, write: Actor[..., Any], begin: Callable[[LedgerStage], Any]
) -> None:
    # When a message is sent in a transaction of any kind
    with begin(ledger):
        write.send("a")
        assert ledger.in_redis() == ledger.owed() == []

    # Then it leaves with the commit
    assert len(ledger.owed()) == 1


def test_a_message_of_a_manual_transaction_leaves_with_its_commit(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given transactions that are begun and ended by hand
    ledger.database.connect()
    with ledger.database.manual_commit():
        ledger.database.begin()
        write.send("undone")
        ledger.database.rollback()
        ledger.database.begin()
        # When a message is sent in one that is committed
        kept = write.send("a")
        assert ledger.owed() == []
        ledger.database.commit()

    # Then it is owed
    assert ledger.owed() == [kept.message_id]


def test_a_message_of_a_transaction_that_is_committed_half_way_leaves_then(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a transaction that is committed in the middle, and rolled back in the end
    with ledger.relay(asks=False), suppress(ChangeOfMindError), ledger.database.atomic() as transaction:
        first = write.send("a")
        transaction.commit()
        write.send("b")

        # Then the first leaves at that moment
        eventually(lambda: ledger.in_redis() == [first.message_id])
        raise ChangeOfMindError

    # And the second never
    assert ledger.owed() == [first.message_id]


def test_a_commit_wakes_the_relay_once(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given no relay that would take the note
    # When a transaction sends many messages, and one that is rolled back sends some
    with ledger.database.atomic():
        for number in range(10):
            write.send(str(number))
    with suppress(ChangeOfMindError), ledger.database.atomic():
        write.send("undone")
        raise ChangeOfMindError

    # Then one note is there
    assert ledger.redis.llen("stage:__wake__") == 1


def test_what_is_woken_publishes_without_having_to_ask(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # Given a relay that asks so seldom that only a wake-up lets it move
    with ledger.relay(asks=False):
        # When two transactions commit
        for label in ("a", "b"):
            sent = ledger.send(write.message(label))

            # Then the message of each is in Redis soon
            eventually(partial(is_in_redis, ledger, sent))


def test_a_message_that_is_sent_twice_is_owed_once(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # When one message is sent in two transactions, and twice in the second
    message = write.message("a")
    ledger.send(message)
    with ledger.database.atomic():
        ledger.broker.enqueue(message)
        ledger.broker.enqueue(message)

    # Then it is one obligation
    assert ledger.owed() == [message.message_id]


def test_the_hooks_around_an_enqueue_see_a_message_that_goes_to_the_ledger(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a middleware that looks at what is sent
    seen: list[tuple[str, str, int | None]] = []

    class Looks(Middleware):
        def before_enqueue(self, broker: Any, message: Message[Any], delay: int | None) -> None:
            seen.append(("before", message.message_id, delay))

        def after_enqueue(self, broker: Any, message: Message[Any], delay: int | None) -> None:
            seen.append(("after", message.message_id, delay))

    ledger.broker.add_middleware(Looks())

    # When a message is sent in a transaction, and one with a delay
    first = ledger.send(write.message("a"))
    second = ledger.send(write.message("b"), delay=LATER_MS)

    # Then its hooks were called as for any other
    assert seen == [
        ("before", first.message_id, None),
        ("after", first.message_id, None),
        ("before", second.message_id, LATER_MS),
        ("after", second.message_id, LATER_MS),
    ]


def test_a_message_that_a_middleware_refuses_is_not_sent(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    # When a message with an invalid key is sent in a transaction that commits
    with ledger.database.atomic():
        ledger.effect("change")
        with pytest.raises(InvalidKey, match="idempotency_key"):
            write.send_with_options(args=("a",), idempotency_key="")

    # Then the change stands, and nothing is owed
    assert ledger.effects() == ["change"]
    assert ledger.rows() == []


def test_a_message_of_a_transaction_that_sql_began_leaves_with_its_commit(
    ledger: LedgerStage, write: Actor[..., Any]
) -> None:
    # Given a transaction that peewee knows nothing of, and that is rolled back
    ledger.database.execute_sql("BEGIN")
    write.send("undone")
    ledger.database.execute_sql("ROLLBACK")

    # When a message is sent in one that is committed
    ledger.database.execute_sql("BEGIN")
    kept = write.send("a")
    assert ledger.owed() == []
    ledger.database.execute_sql("COMMIT")

    # Then it is owed, and the other one is nowhere
    assert ledger.owed() == [kept.message_id]
