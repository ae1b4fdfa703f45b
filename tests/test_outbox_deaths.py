"""A message that failed for good ends its row in the ledger, with one dead letter (T29)."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from time import time
from typing import TYPE_CHECKING, Any

import dramatiq
import psycopg2
import pytest
from dramatiq import Message, Middleware
from dramatiq.middleware import AgeLimit, Callbacks, Pipelines, TimeLimit

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.stage", "tests.ledger_stage")


class ByHandError(Exception):
    """A body fails."""


def by_throws(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor(throws=ByHandError)
    def fails() -> None:
        raise ByHandError

    return fails.message()


def by_retry_when(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor(retry_when=lambda _retries, _error: False)
    def fails() -> None:
        raise ByHandError

    return fails.message()


def by_exhaustion(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor(max_retries=1, min_backoff=10, max_backoff=10)
    def fails() -> None:
        raise ByHandError

    return fails.message()


def by_exhaustion_without_a_key(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor(max_retries=1, min_backoff=10, max_backoff=10, idempotency="off")
    def fails() -> None:
        raise ByHandError

    return fails.message()


def by_an_invalid_key(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor()
    def fails() -> None:
        raise NotImplementedError

    return fails.message()._replace(options={"idempotency_key": ""})


def by_a_result_that_cannot_be_stored(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor()
    def fails() -> object:
        return object()

    return fails.message_with_options(idempotency_key="order 1")


def by_escape(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor()
    def fails() -> None:
        ledger.database.execute_sql("COMMIT")

    return fails.message()


def by_age(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor(max_age=1_000)
    def fails() -> None:
        raise NotImplementedError

    return replace(fails.message(), message_timestamp=int(time() * 1_000) - 5_000)


def by_a_broken_hook(ledger: LedgerStage) -> Message[Any]:
    def broken(retries: int, error: BaseException) -> bool:
        raise TypeError("a bug")

    @ledger.actor(retry_when=broken)
    def fails() -> None:
        raise ByHandError

    return fails.message()


def by_an_unknown_actor(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor()
    def known() -> None:
        raise NotImplementedError

    return known.message()._replace(actor_name="nobody")


def by_malformed_options(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor()
    def fails() -> None:
        raise NotImplementedError

    return fails.message()._replace(options={"retries": "three"})


def by_wrong_arguments(ledger: LedgerStage) -> Message[Any]:
    @ledger.actor(max_retries=0)
    def fails() -> None:
        raise NotImplementedError

    return fails.message("one too many")


DEATHS: dict[Callable[[LedgerStage], Message[Any]], str] = {
    by_throws: "ByHandError",
    by_retry_when: "ByHandError",
    by_exhaustion: "ByHandError",
    by_exhaustion_without_a_key: "ByHandError",
    by_an_invalid_key: "InvalidKey",
    by_a_result_that_cannot_be_stored: "InvalidResult",
    by_escape: "TransactionEscaped",
    by_age: "SkipMessage",
    by_a_broken_hook: "NotDecided",
    by_an_unknown_actor: "ActorNotFound",
    by_malformed_options: "InvalidMessage",
    by_wrong_arguments: "TypeError",
}


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.__name__)
def test_a_failure_for_good_ends_the_row_with_one_dead_letter(
    ledger: LedgerStage, death: Callable[[LedgerStage], Message[Any]]
) -> None:
    # Given a message that cannot be helped
    message = death(ledger)

    # When it was written into the ledger by hand, since no sender could, and is performed
    with ledger.worker_and_relay():
        ledger.sql(
            "INSERT INTO outbox_messages (message_id, actor_name, queue_name, message) "
            "VALUES (%s, %s, %s, %s)",
            message.message_id,
            message.actor_name,
            message.queue_name,
            psycopg2.Binary(message.encode()),
        )
        eventually(ledger.letters)
        ledger.expect_settled()

    # Then it is one dead letter, and owed no longer
    letter = ledger.letter()
    assert (letter.message_id, letter.error_class) == (message.message_id, DEATHS[death])
    assert ledger.effects() == ledger.done() == []


@pytest.mark.parametrize("raw", [b"\xff\x00", b"[]", b'{"options": null}'], ids=repr)
def test_bytes_that_cannot_be_decoded_end_the_row_with_one_dead_letter(
    ledger: LedgerStage, raw: bytes
) -> None:
    # Given such bytes in the ledger before a good message
    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    with ledger.worker_and_relay():
        ledger.sql(
            "INSERT INTO outbox_messages (message_id, actor_name, queue_name, message) "
            "VALUES ('odd', 'write', 'default', %s)",
            psycopg2.Binary(raw),
        )
        # When they are published
        ledger.send(write.message("a"))
        eventually(lambda: not ledger.sql("SELECT 1 FROM outbox_messages"))

    # Then they are kept as they came, and the good one has passed
    assert [letter.message for letter in ledger.letters()] == [raw]
    assert ledger.effects() == ["a"]


@pytest.mark.timeout(40)
@pytest.mark.parametrize(
    "redis_id", ["owed-", "owed-x-y", "owed-0-1-ab\0c", "owed-0-99-ab", "owed-99999999999-1-ab"]
)
def test_an_id_in_redis_that_only_looks_owed_holds_up_nobody_t21(ledger: LedgerStage, redis_id: str) -> None:
    # Given bytes that cannot be decoded under such an id, before a good message
    @ledger.actor()
    def write(label: str) -> None:
        ledger.effect(label)

    ledger.redis.hset("stage:default.msgs", redis_id, b"\xff")
    ledger.redis.rpush("stage:default", redis_id)
    write.send("a")

    # When both are fetched
    with ledger.worker_and_relay():
        eventually(ledger.effects)
        eventually(lambda: ledger.raw("in_hand") == ledger.raw("waiting") == {})

    # Then the one is kept, and the other performed
    kept = [letter.message for letter in ledger.letters()] + list(ledger.raw("dead").values())
    assert kept == [b"\xff"]


def test_a_failure_in_a_stack_without_retries_ends_the_row_with_one_dead_letter(
    ledger_with: Callable[..., LedgerStage],
) -> None:
    # Given a stack in which nobody decides about failures
    ledger = ledger_with(middleware=[AgeLimit(), TimeLimit(), Callbacks(), Pipelines()])

    @dramatiq.actor(broker=ledger.broker)
    def fails() -> None:
        raise ByHandError

    # When an actor fails
    with ledger.worker_and_relay():
        ledger.send(fails.message())
        eventually(ledger.letters)
        ledger.expect_settled()

    # Then it is a dead letter that says so
    assert ledger.letter().error_class == "NotDecided"


def test_exhausted_retries_send_on_retry_exhausted_with_the_dead_letter(ledger: LedgerStage) -> None:
    # Given an actor that another one mourns
    @ledger.actor()
    def mourn(message: dict[str, Any], info: dict[str, int]) -> None:
        ledger.effect(f"mourned {message['args']}")

    @ledger.actor(max_retries=0, on_retry_exhausted="mourn")
    def fails(label: str) -> None:
        raise ByHandError

    # When it fails for good
    with ledger.worker_and_relay():
        ledger.send(fails.message("a"))

        # Then the other hears of it, through the ledger
        eventually(ledger.effects)
        ledger.expect_settled()
    assert ledger.effects() == ["mourned ['a']"]
    assert ledger.letter().attempts == 1


@pytest.mark.parametrize("end", ["done", "fails too"])
def test_a_dead_letter_waits_for_the_rival_that_is_at_work(ledger: LedgerStage, end: str) -> None:
    # Given a message whose last attempt fails while another delivery of it is at work
    @ledger.actor()
    def mourn(message: dict[str, Any], info: dict[str, int]) -> None:
        ledger.effect("mourned")

    failed = Event()

    @ledger.actor(max_retries=0, on_retry_exhausted="mourn")
    def fails(label: str) -> None:
        failed.set()
        raise ByHandError

    insert = (
        "INSERT INTO processed_messages (consumer_name, message_id, performed_by, payload_digest, "
        "digest_version) VALUES ('fails', %s, %s, '', 1)"
    )
    message = fails.message("a")

    class RivalBegins(Middleware):
        def after_process_message(self, broker: Any, message: Any, **outcome: Any) -> None:
            if message.actor_name == "fails":
                cursor.execute(insert, (message.message_id, message.message_id))

    ledger.broker.add_middleware(RivalBegins())
    with ledger.rival() as cursor, ledger.worker_and_relay():
        ledger.send(message)
        assert failed.wait(10)
        eventually(lambda: ledger.sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
        assert ledger.letters() == []

        # When the rival has done the work, or has failed as well
        (cursor.connection.commit if end == "done" else cursor.connection.rollback)()
        ledger.expect_settled()

    # Then there is a dead letter, and who mourns, only if the work was not done
    assert len(ledger.letters()) == (0 if end == "done" else 1)
    assert ledger.effects() == ([] if end == "done" else ["mourned"])
