"""`manage.py dead-letters`: what a person sees, and what requeueing and discarding do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from dramatiq import Message, Worker

from actors import broker, confirm_order, reserve_stock
from manage import manage
from models import DeadLetter, Order, OrderState, OutboxMessage, ProcessedMessage, Stock, database

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result

    from .servers import Servers


@pytest.fixture(autouse=True)
def _tables(clean: Servers) -> Iterator[None]:
    yield
    clean.start()
    database.close()


def run(*arguments: str) -> Result:
    """Run `manage.py dead-letters`; an error that is no sentence for the reader is the test's."""
    result = CliRunner().invoke(manage, ["dead-letters", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def bury(message: Message[Any] | None = None, raw: bytes | None = None, **columns: Any) -> DeadLetter:
    """A dead letter as a worker writes it."""
    if message is None:
        message = reserve_stock.message(1)
    values = {
        "message_id": message.message_id,
        "consumer_name": message.actor_name,
        "actor_name": message.actor_name,
        "queue_name": message.queue_name,
        "arguments": "{}",
        "options": "{}",
        "message": raw or message.encode(),
        "reason": "no retry left",
        "error_class": "ValueError",
        "attempt": 3,
        "attempts": 4,
    }
    letter: DeadLetter = DeadLetter.create(**{**values, **columns})
    return letter


def owed() -> list[tuple[str, int, Message[Any]]]:
    """What the ledger owes: message id, attempt and message."""
    rows = OutboxMessage.select().order_by(OutboxMessage.message_id)
    return [(row.message_id, row.attempt, Message.decode(bytes(row.message))) for row in rows]


def commit_key(message: Message[Any]) -> None:
    """Another delivery does the work of a message."""
    ProcessedMessage.insert(
        consumer_name=message.actor_name,
        message_id=message.message_id,
        performed_by=message.message_id,
        payload_digest=b"",
        digest_version=0,
    ).execute()


def test_no_dead_letter_is_well() -> None:
    # When there is none, then the list says so
    assert run("list").output == "There are no dead letters.\n"
    assert run("list").exit_code == run("list", "--json").exit_code == 0
    assert run("list", "--json").output == ""


def test_a_list_shows_the_newest_first_and_is_a_finding() -> None:
    # Given three
    ids = [bury().message_id for _ in range(3)]

    # When they are listed
    listed = run("list", "--limit", "2", "--json")

    # Then there is a line for each, all that is known in it
    rows = [json.loads(line) for line in listed.output.splitlines()]
    assert listed.exit_code == 1
    assert [row["message_id"] for row in rows] == [ids[2], ids[1]]
    assert set(rows[0]) == set(DeadLetter._meta.fields)


def test_a_list_for_a_person_has_ids_that_can_be_copied() -> None:
    # Given one whose text would be markup
    letter = bury(error_class="[/b]", consumer_name="[red]")

    # When it is listed in a narrow terminal, or into a pipe
    text = run("list").output

    # Then its ids are whole, and its text is as it is
    assert str(letter.id) in text
    assert str(letter.message_id) in text
    assert "[/b]" in text


@pytest.mark.parametrize("by", ["message_id", "id"])
def test_one_is_shown_by_the_id_of_its_message_or_its_row(by: str) -> None:
    # Given two
    letter, other = bury(error_text="what went wrong"), bury()

    # When one is shown
    shown = run("show", str(getattr(letter, by)))

    # Then all that is known of it is there, and nothing of the other
    assert shown.exit_code == 0
    assert "error_text: what went wrong" in shown.output
    assert str(other.message_id) not in shown.output


def test_all_dead_letters_of_a_message_are_shown() -> None:
    # Given two of one message
    message = reserve_stock.message(1)
    first, second = bury(message), bury(message)

    # When it is shown
    lines = run("show", message.message_id, "--json").output.splitlines()

    # Then both are there
    assert [json.loads(line)["id"] for line in lines] == [first.id, second.id]


@pytest.mark.parametrize("command", ["show", "requeue", "discard"])
def test_an_id_that_is_not_there_is_a_finding_and_the_others_are_done(command: str) -> None:
    # Given one
    letter = bury()

    # When another is named too
    result = run(command, "77", str(letter.id))

    # Then it is named, the exit code says so, and the one that is there was done
    assert result.exit_code == 1
    assert "77" in result.output
    assert str(letter.message_id) in result.output


@pytest.mark.parametrize(
    "arguments",
    [["show"], ["requeue"], ["discard"], ["nonsense"], ["list", "--limit", "-1"], ["list", "--limit", "x"]],
)
def test_wrong_usage_is_refused(arguments: list[str]) -> None:
    # When something is missing or wrong, then the exit code is that of wrong usage
    assert run(*arguments).exit_code == 2


def test_a_requeued_message_is_owed_again_as_if_it_were_new() -> None:
    # Given a dead letter with the traces of its attempts
    traces = {"retries": 3, "traceback": "Traceback", "requeue_timestamp": 1, "eta": 1, "color": "red"}
    message = reserve_stock.message(1)._replace(options=traces)
    old = message._replace(message_timestamp=1, queue_name="default.DQ")
    letter = bury(old)

    # When it is requeued
    result = run("requeue", str(letter.id), "--json")

    # Then it is owed above its last attempt, and no longer dead
    assert result.exit_code == 0
    assert json.loads(result.output)["outcome"] == "requeued"
    assert DeadLetter.select().count() == 0
    ((message_id, attempt, anew),) = owed()
    assert (message_id, attempt) == (message.message_id, 4)

    # And its retries and its age begin anew, all else stays
    assert anew.options == {"color": "red"}
    assert (anew.args, anew.queue_name) == ((1,), "default")
    now_ms = database.execute_sql("SELECT extract(epoch FROM now()) * 1000").fetchone()[0]
    assert 0 <= now_ms - anew.message_timestamp < 60_000


def test_a_requeued_message_takes_effect_once_and_not_where_it_did_meanwhile(clean: Servers) -> None:
    # Given two orders whose messages are dead, the second of which was done meanwhile
    Stock.create(sku="SKU-1", quantity=10)
    orders = [Order.create(sku="SKU-1", quantity=2, customer="Ada") for _ in range(2)]
    messages = [reserve_stock.message(order.id) for order in orders]
    letters = [bury(message) for message in messages]
    commit_key(messages[1])

    # When both are requeued, and a worker is there
    assert run("requeue", *(str(letter.id) for letter in letters)).exit_code == 0
    worker = Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        eventually(lambda: not owed() and not broker.do_qsize("default"), what=owed)
    finally:
        worker.stop()

    # Then the first took effect, and the second did not take effect twice
    states = [Order.get_by_id(order.id).state for order in orders]
    assert states == [OrderState.CONFIRMED, OrderState.PLACED]
    assert Stock.get_by_id("SKU-1").quantity == 8


def test_requeueing_is_one_transaction() -> None:
    # Given a ledger that cannot be written to
    letter = bury()
    database.execute_sql("ALTER TABLE outbox_messages RENAME TO away")
    try:
        # When one is requeued, then that fails with a sentence
        result = run("requeue", str(letter.id))
        assert result.exit_code == 1
        assert "PostgreSQL says" in result.output
    finally:
        database.execute_sql("ALTER TABLE away RENAME TO outbox_messages")

    # And it is still there
    assert DeadLetter.select().count() == 1


def test_a_message_that_is_owed_a_later_attempt_is_not_set_back() -> None:
    # Given a message that is dead, and owed by a later attempt
    letter = bury()
    assert broker.ledger is not None
    broker.ledger.owe_again(7, Message.decode(bytes(letter.message)), 0)

    # When it is requeued
    assert run("requeue", str(letter.id)).exit_code == 0

    # Then that attempt stands
    assert [attempt for _, attempt, _ in owed()] == [8]


def test_one_that_escaped_its_transaction_needs_to_be_forced() -> None:
    # Given one whose effect may stand without a key, and another
    escaped, other = bury(error_class="TransactionEscaped"), bury(confirm_order.message(1))

    # When both are requeued
    result = run("requeue", str(escaped.id), str(other.id))

    # Then the first is refused with a reason, and the other is owed
    assert result.exit_code == 1
    assert "its effect may stand without a key" in result.output
    assert [message_id for message_id, _, _ in owed()] == [other.message_id]

    # And with force it is owed too
    assert run("requeue", str(escaped.id), "--force").exit_code == 0
    assert len(owed()) == 2


#: What cannot be sent again, by what is wrong with it.
UNFIT: dict[str, Callable[[Message[Any]], bytes]] = {
    "bytes": lambda _: b"\xff\x00",
    "a list": lambda _: b"[]",
    "no options": lambda message: json.dumps(message.asdict() | {"options": None}).encode(),
    "no actor": lambda message: json.dumps(message.asdict() | {"actor_name": None}).encode(),
    "a queue that is none": lambda message: json.dumps(message.asdict() | {"queue_name": 5}).encode(),
    "a NUL": lambda message: json.dumps(message.asdict() | {"message_id": "a\0b"}).encode(),
    "a surrogate": lambda message: json.dumps(message.asdict() | {"message_id": "\ud800"}).encode(),
    "too deep": lambda message: message.encode().replace(b"[1]", b"[" * 990 + b"]" * 990),
}


@pytest.mark.parametrize("what", UNFIT)
def test_one_that_cannot_be_sent_is_refused_with_a_sentence_and_stays(what: str) -> None:
    # Given one that no worker can work with, and another
    message = reserve_stock.message(1)
    unfit, other = bury(message, UNFIT[what](message)), bury(confirm_order.message(1))

    # When both are requeued
    result = run("requeue", str(unfit.id), str(other.id))

    # Then the first stays, and the reader hears why; the other is owed
    assert result.exit_code == 1
    assert f"Dead letter {unfit.id} cannot be sent" in result.output
    assert [letter.id for letter in DeadLetter.select()] == [unfit.id]
    assert [message_id for message_id, _, _ in owed()] == [other.message_id]


def test_discarding_deletes_for_good() -> None:
    # Given two
    letter, other = bury(), bury()

    # When one is discarded
    result = run("discard", str(letter.message_id))

    # Then the other is left, and nothing is owed
    assert result.exit_code == 0
    assert [left.id for left in DeadLetter.select()] == [other.id]
    assert owed() == []


def test_requeueing_does_not_need_redis(clean: Servers) -> None:
    # Given a Redis that is away
    letter = bury()
    clean.redis.stop()

    # When one is requeued, then it is owed
    assert run("requeue", str(letter.id)).exit_code == 0
    assert len(owed()) == 1


@pytest.mark.parametrize("arguments", [["list"], ["show", "1"], ["requeue", "1"], ["discard", "1"]])
def test_a_postgresql_that_is_away_is_said_in_a_sentence(clean: Servers, arguments: list[str]) -> None:
    # Given a PostgreSQL that is away
    clean.postgres.stop()

    # When a command asks it, then the reader hears of that
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith("Error: PostgreSQL says: ")


def test_a_redis_that_is_away_is_said_in_a_sentence(clean: Servers) -> None:
    # Given a Redis that is away, when its dead letters are asked for, then the reader hears of that
    clean.redis.stop()
    result = run("list", "--redis")
    assert result.exit_code == 1
    assert result.output.startswith("Error: Redis says: ")
