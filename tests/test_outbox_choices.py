"""What a sender can choose: at once on purpose, always through the outbox; and what is refused."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import Actor, Message, Middleware, group, pipeline
from dramatiq.results import ResultMissing

from middleware import DurableRedisBroker
from middleware.errors import ConfigurationError, MessageTooLarge, WaitInsideTransaction

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")

#: Longer than a test may take: what waits that long was not refused at once.
TOO_LONG_MS = 150_000


class ChangeOfMindError(Exception):
    """The application rolls its transaction back."""


def writer(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is its label, which it returns."""
    ledger.keep_results()

    @ledger.actor(store_results=True)
    def write(label: str) -> str:
        ledger.effect(label)
        return label

    return write


def result_of(ledger: LedgerStage, message: Message[Any], **how: Any) -> Any:
    """The result of a message in the broker of the stage, which is not the global one."""
    return message.get_result(backend=ledger.broker.get_results_backend(), **how)


# At once on purpose


def test_outbox_false_sends_at_once_inside_a_transaction_and_survives_its_roll_back(
    ledger: LedgerStage,
) -> None:
    write = writer(ledger)
    # Given a transaction that will be rolled back
    with suppress(ChangeOfMindError), ledger.database.atomic():
        # When a message is sent at once on purpose
        sent = write.send_with_options(args=("a",), outbox=False)

        # Then it is under way
        assert ledger.in_redis() == [sent.message_id]
        raise ChangeOfMindError

    # And the roll-back does not call it back; the choice is nothing that the message carries
    assert ledger.in_redis() == [sent.message_id]
    assert ledger.rows() == []
    assert "outbox" not in ledger.only("waiting").options


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_outbox_false_is_refused_together_with_a_delay(ledger: LedgerStage, *, inside: bool) -> None:
    write = writer(ledger)
    # When a message is sent at once and later
    with (
        ledger.database.atomic() if inside else nullcontext(),
        pytest.raises(ConfigurationError, match=r"outbox=False.*delay"),
    ):
        write.send_with_options(args=("a",), outbox=False, delay=0)

    # Then it is sent in no way
    assert ledger.in_redis() == []
    assert ledger.rows() == []


def test_a_message_of_the_ledger_does_not_carry_the_choice(ledger: LedgerStage) -> None:
    write = writer(ledger)
    # When a message that says outbox=True is sent in a transaction
    with ledger.database.atomic():
        write.send_with_options(args=("a",), outbox=True)

    # Then its row is like any other
    assert "outbox" not in ledger.row().message.options


# Always through the outbox


def test_outbox_always_makes_a_send_outside_a_transaction_of_its_own_i3(
    ledger_with: Callable[..., LedgerStage],
) -> None:
    # Given a broker that never sends past the ledger, and a relay that only a wake-up lets move
    ledger = ledger_with(broker={"outbox": "always"})
    write = writer(ledger)
    with ledger.relay(asks=False):
        # When a message is sent outside a transaction
        sent = write.send("a")

        # Then it is owed at once, and in Redis soon
        assert ledger.owed() == [sent.message_id]
        eventually(lambda: ledger.in_redis() == [sent.message_id])


def test_outbox_always_needs_no_redis_to_send(ledger_with: Callable[..., LedgerStage]) -> None:
    # Given a broker that never sends past the ledger, and no Redis
    ledger = ledger_with(broker={"outbox": "always"})
    write = writer(ledger)
    ledger.servers.redis.stop()

    # When a message is sent outside a transaction
    sent = write.send("a")

    # Then it is owed
    assert ledger.owed() == [sent.message_id]


def test_outbox_false_sends_at_once_also_past_outbox_always(ledger_with: Callable[..., LedgerStage]) -> None:
    ledger = ledger_with(broker={"outbox": "always"})
    # When one message goes past the ledger on purpose
    sent = writer(ledger).send_with_options(args=("a",), outbox=False)

    # Then it is in Redis and not owed
    assert ledger.in_redis() == [sent.message_id]
    assert ledger.rows() == []


def test_a_broker_knows_no_other_kind_of_outbox() -> None:
    # When a broker is made with a word that it does not know, it says which it does
    unknown: Any = "never"
    with pytest.raises(ConfigurationError, match="'transaction' or 'always'"):
        DurableRedisBroker(url="redis://localhost", outbox=unknown)


def test_without_a_ledger_there_is_no_outbox() -> None:
    # Given a broker without a ledger
    broker = DurableRedisBroker(url="redis://localhost")

    @broker_actor(broker)
    def write(label: str) -> None:
        raise NotImplementedError(label)

    # When it is asked for the statement, it says what it needs
    with pytest.raises(ConfigurationError, match="ledger="):
        broker.outbox_statement(write.message("a"))


def broker_actor(broker: DurableRedisBroker) -> Callable[[Callable[..., Any]], Actor[..., Any]]:
    import dramatiq

    declare: Any = dramatiq.actor(broker=broker)
    return declare  # type: ignore[no-any-return] # its overloads are narrower


# Too large


def sized(ledger: LedgerStage, write: Actor[..., Any], size: int) -> str:
    """The label that makes a message of so many bytes."""
    return "x" * (size - len(write.message("").encode()))


@pytest.mark.parametrize("way", ["send", "delay", "enqueue_on", "at once"])
def test_a_message_that_is_too_large_is_refused_with_a_sentence(
    ledger_with: Callable[..., LedgerStage], way: str
) -> None:
    # Given a limit, and a transaction with a change and a message just within the limit
    ledger = ledger_with(broker={"max_message_bytes": 2_000})
    write = writer(ledger)
    with ledger.database.atomic():
        ledger.effect("change")
        kept = write.send(sized(ledger, write, 2_000))

        # When one byte more is sent, in whatever way
        message = write.message(sized(ledger, write, 2_001))
        send: dict[str, Callable[[], object]] = {
            "send": lambda: ledger.broker.enqueue(message),
            "delay": lambda: ledger.broker.enqueue(message, delay=1),
            "enqueue_on": lambda: ledger.broker.enqueue_on(ledger.database.connection(), message),
            "at once": lambda: ledger.broker.enqueue(message.copy(options={"outbox": False})),
        }
        with pytest.raises(MessageTooLarge, match=r"has \d+ bytes; 2000 are allowed.*send its id") as refused:
            send[way]()
        assert message.message_id in str(refused.value)

    # Then the rest of the transaction stands
    assert ledger.effects() == ["change"]
    assert ledger.owed() == [kept.message_id]
    assert ledger.in_redis() == []


def test_a_message_that_is_too_large_is_refused_outside_a_transaction_too(
    ledger_with: Callable[..., LedgerStage],
) -> None:
    ledger = ledger_with(broker={"max_message_bytes": 2_000})
    write = writer(ledger)

    # When one byte too many is sent outside
    with pytest.raises(MessageTooLarge):
        write.send(sized(ledger, write, 2_001))

    # Then nothing is under way
    assert ledger.in_redis() == []


# Waiting for what leaves only with the commit


def wait_for_message(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    result_of(ledger, write.send("a"), block=True, timeout=TOO_LONG_MS)


def wait_for_group(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    group([write.message("a"), write.message("b")], broker=ledger.broker).run().wait(timeout=TOO_LONG_MS)


def wait_for_pipeline(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    steps(ledger, write).run().get_result(block=True, timeout=TOO_LONG_MS)


def wait_for_group_of_pipelines(ledger: LedgerStage, write: Actor[..., Any]) -> None:
    group([steps(ledger, write)], broker=ledger.broker).run().wait(timeout=TOO_LONG_MS)


def steps(ledger: LedgerStage, write: Actor[..., Any]) -> pipeline:
    last = write.message_with_options(args=("b",), pipe_ignore=True)
    return pipeline([write.message("a"), last], broker=ledger.broker)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "wait", [wait_for_message, wait_for_group, wait_for_pipeline, wait_for_group_of_pipelines]
)
def test_waiting_inside_a_transaction_for_what_leaves_with_its_commit_is_refused_at_once(
    ledger: LedgerStage, wait: Callable[[LedgerStage, Actor[..., Any]], None]
) -> None:
    # Given a worker, and a transaction that sends
    write = writer(ledger)
    with ledger.worker_and_relay():
        with ledger.database.atomic():
            # When it waits for the result, it hears that it would wait for itself
            with pytest.raises(WaitInsideTransaction, match="after the commit"):
                wait(ledger, write)
            ledger.effect("change")

        # Then its transaction stands, and what it sent is done
        eventually(lambda: {"a", "change"} <= set(ledger.effects()))
        ledger.expect_settled()


def test_waiting_after_the_commit_gets_the_result(ledger: LedgerStage) -> None:
    # Given a message that left with a commit
    write = writer(ledger)
    with ledger.worker_and_relay():
        sent = ledger.send(write.message("a"))

        # When its result is waited for, outside and in another transaction
        assert result_of(ledger, sent, block=True) == "a"
        with ledger.database.atomic():
            # Then it comes
            assert result_of(ledger, sent, block=True) == "a"
            # And what was sent at once in this one can be waited for
            direct = write.send_with_options(args=("b",), outbox=False)
            assert result_of(ledger, direct, block=True) == "b"


def test_what_another_transaction_sent_meanwhile_can_be_waited_for(ledger: LedgerStage) -> None:
    # Given an open transaction, a worker without a relay, and somebody else who sends meanwhile
    write = writer(ledger)
    with ledger.worker(), ledger.database.atomic():
        ledger.database.execute_sql("SELECT 1")
        sent: list[Message[Any]] = []
        thread = Thread(target=lambda: sent.append(ledger.send(write.message("a"))))
        thread.start()
        thread.join()

        # When its result is waited for, before it has left
        # Then it comes
        assert result_of(ledger, sent[0], block=True) == "a"


def test_looking_for_a_result_inside_a_transaction_without_waiting_is_allowed(ledger: LedgerStage) -> None:
    write = writer(ledger)
    # When a result is looked for without waiting, it is missing, as it would be anywhere
    with ledger.database.atomic(), pytest.raises(ResultMissing):
        result_of(ledger, write.send("a"))


def test_an_actor_that_waits_for_what_it_sent_fails_at_once(ledger: LedgerStage) -> None:
    # Given an actor that waits for a message of its own transaction
    write = writer(ledger)
    failed = Event()

    class Sees(Middleware):
        def after_process_message(self, broker: Any, message: Any, **outcome: Any) -> None:
            if isinstance(outcome["exception"], WaitInsideTransaction):
                failed.set()

    ledger.broker.add_middleware(Sees())

    @ledger.actor(max_retries=0)
    def waits() -> None:
        result_of(ledger, write.send("a"), block=True, timeout=TOO_LONG_MS)

    # When it is performed
    with ledger.worker_and_relay():
        waits.send()
        assert failed.wait(10)
        eventually(ledger.letters)

    # Then what it sent has not left
    assert ledger.letter().error_class == "WaitInsideTransaction"
    assert ledger.effects() == []
