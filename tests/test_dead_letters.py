"""How a delivery ends that cannot be helped by trying again: as a dead letter, at once."""

from __future__ import annotations

import json
from dataclasses import replace
from time import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import dramatiq
from dramatiq.encoder import PickleEncoder
from dramatiq.middleware import AgeLimit, Callbacks, Middleware, Pipelines, TimeLimit

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from dramatiq import Message

    from .stage import Stage

pytest_plugins = ("tests.stage",)


def test_an_error_that_the_actor_throws_is_a_dead_letter_at_once(stage: Stage) -> None:
    # Given an actor that says which of its errors are final
    @stage.actor(throws=ValueError)
    def write(label: str) -> None:
        stage.effect(label)
        raise ValueError("no")

    # When it raises one
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(dead=[message])

    # Then nothing is stored and no retry was spent
    assert "retries" not in stage.only("dead").options
    assert stage.stored() == ([], [])


def test_a_permanent_error_is_final_whatever_the_message_throws(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an encoder that carries classes, and a message that brings its own final errors
    monkeypatch.setattr("dramatiq.message.global_encoder", PickleEncoder())

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        stage.database.commit()

    # When its body tries to end the transaction
    with stage.worker():
        message = write.send_with_options(args=("a",), throws=KeyError)
        stage.expect_in_redis(dead=[message])

    # Then that is final too
    assert stage.stored() == ([], [])
    assert "retries" not in stage.only("dead").options


def test_an_error_that_retry_when_declines_is_a_dead_letter_at_once(stage: Stage) -> None:
    # Given an actor that declines every retry
    @stage.actor(retry_when=lambda _retries, _error: False)
    def write(labels: list[str]) -> None:
        stage.effect(labels.pop())
        raise ValueError("no")

    # When it raises
    with stage.worker():
        message = write.send(["a"])
        stage.expect_in_redis(dead=[message])

    # Then the message lies there as it came (T17)
    assert stage.only("dead").args == (["a"],)
    assert stage.stored() == ([], [])


def test_exhausted_retries_are_a_dead_letter_and_send_on_retry_exhausted(stage: Stage) -> None:
    # Given an actor with one retry, and an actor that shall hear of it
    attempts: list[str] = []

    @stage.actor()
    def mourn(message: dict[str, Any], info: dict[str, int]) -> None:
        stage.effect(f"mourned after {info['retries']} retries: {message['args']}")

    @stage.actor(max_retries=1, min_backoff=20, max_backoff=20, on_retry_exhausted="mourn")
    def write(label: str) -> None:
        attempts.append(label)
        stage.effect(label)
        raise ValueError("no")

    # When it fails twice
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(dead=[message])

    # Then it was tried twice, and only the other actor has had an effect
    assert attempts == ["a", "a"]
    assert stage.effects() == ["mourned after 1 retries: ['a']"]
    assert [consumer for consumer, _ in stage.key_rows()] == ["mourn"]


def test_a_message_that_is_too_old_is_a_dead_letter(stage: Stage) -> None:
    # Given an age limit, which fails and skips
    @stage.actor(max_age=1_000)
    def write(label: str) -> None:
        stage.effect(label)

    # When an old message is delivered
    with stage.worker():
        message = replace(write.message("a"), message_timestamp=int(time() * 1000) - 5_000)
        stage.broker.enqueue(message)
        stage.expect_in_redis(dead=[message])

    # Then it was not performed
    assert stage.stored() == ([], [])


def test_a_failure_that_a_broken_retry_when_does_not_decide_is_a_dead_letter(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a retry_when with a bug
    def broken(retries: int, error: BaseException) -> bool:
        raise TypeError("a bug")

    @stage.actor(retry_when=broken)
    def write(label: str) -> None:
        stage.effect(label)
        raise ValueError("no")

    # When the actor fails
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(dead=[message])

    # Then the message does not come again for ever, and the log says why
    assert stage.stored() == ([], [])
    assert "NotDecided" in caplog.text


def test_a_failure_in_a_stack_without_retries_is_a_dead_letter(
    stage_with: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    # Given a stack in which nobody decides about failures
    stage = stage_with(middleware=[AgeLimit(), TimeLimit(), Callbacks(), Pipelines()])

    @dramatiq.actor(broker=stage.broker)
    def write(label: str) -> None:
        stage.effect(label)
        raise ValueError("no")

    # When an actor fails
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(dead=[message])

    # Then the message is kept, and the log says why
    assert stage.stored() == ([], [])
    assert "NotDecided" in caplog.text


def test_a_failure_whose_retry_cannot_be_encoded_is_a_dead_letter(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a middleware that leaves something in the options that no encoder can carry
    class Tracer(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            message.options["span"] = object()

    stage.broker.add_middleware(Tracer())

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        raise ValueError("no")

    # When the actor fails
    with stage.worker():
        message = write.send("a")
        stage.expect_in_redis(dead=[message])

    # Then the message does not come again for ever
    assert len(stage.seen("raised")) == 1
    assert stage.stored() == ([], [])
    assert "NotDecided" in caplog.text


def test_a_message_for_an_unknown_actor_is_a_dead_letter_and_the_others_go_on(stage: Stage) -> None:
    # Given a message that no actor here knows, before one that an actor does
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    unknown = replace(write.message("a"), actor_name="nobody")
    stage.broker.enqueue(unknown)
    write.send("b")

    # When both are fetched
    with stage.worker():
        stage.expect_in_redis(dead=[unknown])

    # Then the other one was performed
    assert stage.effects() == ["b"]


def put(stage: Stage, raw: bytes) -> str:
    """Put bytes in the queue, as anybody may who speaks to Redis; returns their id."""
    redis_id = str(uuid4())
    stage.redis.hset("stage:default.msgs", redis_id, raw)
    stage.redis.rpush("stage:default", redis_id)
    return redis_id


def encoded(message: Message[Any], **fields: Any) -> bytes:
    """A message as JSON with some fields replaced."""
    return json.dumps({**message.asdict(), **fields}).encode()


#: What nobody can decode, or work with.
DAMAGED: list[Callable[[Message[Any]], bytes]] = [
    lambda _: b"\xff\x00",
    lambda _: b"[]",
    lambda _: b"null",
    lambda _: b'"text"',
    lambda _: b"{}",
    lambda _: b"[" * 100_000,
    lambda message: encoded(message, options=None),
    lambda message: encoded(message, args=None),
    lambda message: encoded(message, kwargs=[]),
    lambda message: encoded(message, message_id=5),
    lambda message: encoded(message, actor_name=[]),
    lambda message: encoded(message, queue_name=None),
    lambda message: encoded(message, message_timestamp="now"),
    lambda message: encoded(message, surplus=1),
]
#: What Retries, TimeLimit, AgeLimit and the worker cannot compute with.
ODD_OPTIONS: list[dict[str, Any]] = [
    {"retries": "1"},
    {"retries": None},
    {"retries": -1},
    {"max_retries": "many"},
    {"min_backoff": []},
    {"max_backoff": {}},
    {"time_limit": "10"},
    {"time_limit": -1},
    {"max_age": "old"},
    {"throws": "ValueError"},
    {"throws": ["ValueError"]},
]


def test_messages_that_cannot_be_decoded_are_dead_letters_and_their_fetch_is_kept_t21(stage: Stage) -> None:
    # Given such messages, and good ones between them
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    damaged = {}
    for damage in DAMAGED:
        raw = damage(write.message("lost"))
        damaged[put(stage, raw)] = raw
        write.send("good")

    # When they come with one fetch
    with stage.worker():
        eventually(lambda: stage.redis.hlen("stage:default.msgs") == 0)

    # Then the good ones are performed, and the bytes are kept for whoever looks at them
    assert stage.effects() == ["good"] * len(DAMAGED)
    assert stage.raw("dead") == damaged


def test_an_option_that_dramatiq_cannot_compute_with_is_a_dead_letter_i8(stage: Stage) -> None:
    # Given one thread, and messages with an option of a wrong type
    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        if label == "odd":
            raise ValueError("no")

    odd = []
    for options in ODD_OPTIONS:
        odd.append(write.message("odd"))
        put(stage, encoded(odd[-1], options=options))
    write.send("a")

    # When they are fetched, and another message after them
    with stage.worker(threads=1):
        stage.expect_in_redis(dead=odd)

    # Then they have not run, and the thread has taken the next message
    assert stage.effects() == ["a"]
    assert len(stage.key_rows()) == 1
