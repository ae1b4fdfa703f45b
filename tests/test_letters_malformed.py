"""What is no proper message has one effect or one dead letter, and stops no other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from dramatiq import Middleware

from .letters import owe, put, raw_of
from .processes import eventually

if TYPE_CHECKING:
    from dramatiq import Actor

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.ledger_stage", "tests.relay_fixtures")

#: A hot loop delivers, or at least logs, far more often than this.
FEW = 12


def changed(**fields: Any) -> Any:
    """A message with some fields replaced."""
    return lambda message: raw_of(message, **fields)


def without(field: str) -> Any:
    """A message that lacks a field."""
    return lambda message: json.dumps(
        {name: value for name, value in message.asdict().items() if name != field}
    ).encode()


#: Bytes that nobody can perform.
DEAD: dict[str, Any] = {
    "nothing": lambda _: b"",
    "no text": lambda _: b"\x80\x81\x00",
    "no JSON": lambda _: b"{",
    "a list": lambda _: b"[]",
    "a number": lambda _: b"1",
    "null": lambda _: b"null",
    "half a message": lambda message: message.encode()[:40],
    "no actor_name": without("actor_name"),
    "no options": without("options"),
    "a field too many": changed(extra=1),
    "an unknown actor": changed(actor_name="nobody"),
    "actor_name null": changed(actor_name=None),
    "actor_name with NUL": changed(actor_name="write\0"),
    "queue_name 5": changed(queue_name=5),
    "options null": changed(options=None),
    "options a list": changed(options=[]),
    "args null": changed(args=None),
    "kwargs a list": changed(kwargs=[["label", "odd"]]),
    "message_id null": changed(message_id=None),
    "message_id empty": changed(message_id=""),
    "message_id with NUL": changed(message_id="a\0b"),
    "message_id no text": changed(message_id="\ud800"),
    "message_id too long": changed(message_id="x" * 6_000),
    "timestamp null": changed(message_timestamp=None),
    "retries three": changed(options={"retries": "three"}),
    "retries null": changed(options={"retries": None}),
    "retries negative": changed(options={"retries": -1}),
    "retries too many": changed(options={"retries": 1e300}),
    "retries no number": changed(options={"retries": float("nan")}),
    "max_retries a text": changed(options={"max_retries": "3"}),
    "time_limit a text": changed(options={"time_limit": "3"}),
    "max_age a list": changed(options={"max_age": []}),
    "min_backoff no number": changed(options={"min_backoff": float("nan")}),
    "throws a name": changed(options={"throws": "ValueError"}),
    "eta too late": changed(options={"eta": 1e30}),
    "eta no number": changed(options={"eta": float("nan")}),
    "key null": changed(options={"idempotency_key": None}),
    "key 5": changed(options={"idempotency_key": 5}),
    "key too long": changed(options={"idempotency_key": "x" * 600}),
    "one argument too many": changed(args=["a", "b", "c"]),
    "an argument unknown": changed(kwargs={"nobody": 1}),
}
#: Oddities that do not keep anybody from doing the work.
DONE: dict[str, Any] = {
    "eta tomorrow": changed(options={"eta": "tomorrow"}),
    "eta true": changed(options={"eta": True}),
    "eta null": changed(options={"eta": None}),
    "eta long ago": changed(options={"eta": 1}),
    "another queue's name": changed(queue_name="other"),
    "max_retries null": changed(options={"max_retries": None}),
    "an option too many": changed(options={"\0": "\ud800"}),
    "timestamp no number": changed(message_timestamp=float("nan")),
}


@pytest.fixture
def write(ledger: LedgerStage) -> Actor[..., Any]:
    """An actor whose effect is its label; it has no retry."""

    @ledger.actor(max_retries=0)
    def write(label: str) -> None:
        ledger.effect(label)

    return write


def ends(ledger: LedgerStage) -> list[str]:
    """How everything has ended that is not good: by an effect or by a dead letter."""
    effects = [label for label in ledger.effects() if not label.startswith("good")]
    return effects + [f"dead: {letter.reason}" for letter in ledger.letters()]


@pytest.mark.parametrize("way", ["redis", "ledger"])
@pytest.mark.parametrize("what", [*DEAD, *DONE])
def test_an_odd_message_has_one_end_and_the_good_ones_of_its_fetch_pass_t21(
    ledger: LedgerStage, write: Actor[..., Any], what: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Given an odd message between two good ones
    message = write.message("odd")
    raw = (DEAD | DONE)[what](message)
    good = [write.message("good 1"), write.message("good 2")]
    if way == "redis":
        put(ledger, good[0].encode(), raw, good[1].encode())
    else:
        for one, its_raw in ((good[0], good[0].encode()), (message, raw), (good[1], good[1].encode())):
            owe(ledger, one, its_raw)

    # When they are fetched
    with ledger.worker_and_relay(threads=1):
        eventually(lambda: ends(ledger), what=lambda: (ledger.places(), caplog.text))
        eventually(
            lambda: (
                not ledger.sql("SELECT FROM outbox_messages") and not ledger.redis.hlen("stage:default.msgs")
            )
        )

    # Then the odd one has one end, and has not come again and again
    assert ends(ledger) == (["odd"] if what in DONE else [f"dead: {ledger.letter().reason}"])
    assert len(ledger.witness.seen) + len(caplog.records) <= FEW, caplog.text
    if what in DEAD:
        assert ledger.letter().message == raw

    # And the others are done
    assert [label for label in ledger.effects() if label != "odd"] == ["good 1", "good 2"]


COMMIT_KEY = """
    INSERT INTO processed_messages VALUES (%s, %s, 'rival', '', 1, NULL) ON CONFLICT DO NOTHING
"""


class Rival(Middleware):
    """Does the work of a message while its delivery fails."""

    def __init__(self, ledger: LedgerStage) -> None:
        self.ledger = ledger

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        self.ledger.sql(COMMIT_KEY, message.actor_name, message.message_id)


@pytest.mark.parametrize("end", ["fails", "escapes", "mismatch"])
def test_a_dead_letter_is_not_written_where_the_work_was_done_but_for_two_exceptions(
    ledger: LedgerStage, end: str
) -> None:
    """PayloadMismatch and TransactionEscaped say something about a key that is committed."""
    # Given a body that fails for good, and a rival who does the work meanwhile
    ledger.broker.add_middleware(Rival(ledger))

    @ledger.actor(max_retries=0)
    def write(label: str) -> None:
        if end == "escapes":
            ledger.database.execute_sql("COMMIT")
        raise ValueError("no")

    message = write.message("a")
    if end == "mismatch":
        ledger.sql(
            "INSERT INTO processed_messages VALUES ('write', %s, 'b', '', 1, NULL)", message.message_id
        )

    # When it has ended
    with ledger.worker_and_relay():
        ledger.send(message)
        ledger.expect_settled()

    # Then nobody mourns what was done
    classes = {"fails": [], "escapes": ["TransactionEscaped"], "mismatch": ["PayloadMismatch"]}
    assert [letter.error_class for letter in ledger.letters()] == classes[end]
    assert ledger.done() == [message.message_id]
