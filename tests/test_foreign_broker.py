"""The guard on a broker of Dramatiq's own, with its default stack."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.brokers.stub import StubBroker
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from middleware import IdempotentConsumer
from middleware.errors import InvalidKey, PayloadMismatch, TransactionEscaped

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .stage import Stage

pytest_plugins = ("tests.stage",)


@pytest.fixture
def broker(stage: Stage) -> StubBroker:
    """Dramatiq's default stack, then the guard, then what sees the outcomes."""
    broker = StubBroker(fail_fast_default=False)
    broker.add_middleware(IdempotentConsumer(stage.inbox))
    broker.add_middleware(stage.witness)
    return broker


@contextmanager
def worker(broker: StubBroker) -> Iterator[None]:
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    try:
        yield
    finally:
        worker.stop()


def write_on(stage: Stage, broker: StubBroker, **options: Any) -> Any:
    """An actor with one effect."""

    @dramatiq.actor(broker=broker, **options)
    def write(label: str) -> str:
        stage.effect(label)
        return f"wrote {label}"

    return write


def perform(broker: StubBroker) -> None:
    with worker(broker):
        broker.join("default", timeout=10_000)


def test_three_deliveries_of_a_message_have_one_effect_i1(stage: Stage, broker: StubBroker) -> None:
    # Given three copies of one message
    message = write_on(stage, broker).message("a")
    for _ in range(3):
        broker.enqueue(message)

    # When they are performed
    perform(broker)

    # Then one took effect
    assert stage.effects() == ["a"]
    assert stage.key_rows() == [("write", message.message_id)]
    assert len(stage.seen("returned")) == 3


def test_an_actor_that_was_declared_before_the_middleware_came_is_guarded_i1(stage: Stage) -> None:
    # Given an actor on a broker without the guard
    broker = StubBroker()
    write = write_on(stage, broker)

    # When the guard is added, and a message comes three times
    broker.add_middleware(IdempotentConsumer(stage.inbox))
    message = write.message("a")
    for _ in range(3):
        broker.enqueue(message)
    perform(broker)

    # Then it took effect once
    assert stage.effects() == ["a"]


@pytest.mark.parametrize("results_position", [0, 100])
@pytest.mark.parametrize("position", [0, 2, 100])
def test_the_guarantee_does_not_depend_on_the_order_of_the_stack_i1(
    stage: Stage, position: int, results_position: int
) -> None:
    # Given the guard, and Results, anywhere in the stack
    broker, backend = StubBroker(), StubBackend()
    broker.add_middleware(Results(backend=backend))
    broker.middleware.insert(results_position, broker.middleware.pop())
    broker.add_middleware(IdempotentConsumer(stage.inbox))
    broker.middleware.insert(position, broker.middleware.pop())
    write = write_on(stage, broker, store_results=True)

    # When a message comes three times
    message = write.message("a")
    for _ in range(3):
        broker.enqueue(message)
    perform(broker)

    # Then it took effect once, and its result is there
    assert stage.effects() == ["a"]
    assert stage.results() == ["wrote a"]
    assert message.get_result(backend=backend) == "wrote a"


def test_what_is_retried_is_the_message_as_it_came_t17(stage: Stage, broker: StubBroker) -> None:
    # Given an actor that changes its arguments and fails once
    attempts: list[list[str]] = []

    @dramatiq.actor(broker=broker, min_backoff=20, max_backoff=20)
    def write(labels: list[str]) -> None:
        attempts.append(list(labels))
        stage.effect(labels.pop())
        if len(attempts) == 1:
            raise ValueError("not yet")

    # When it is performed
    write.send(["a"])
    perform(broker)

    # Then both attempts had the same arguments, and one took effect
    assert attempts == [["a"], ["a"]]
    assert stage.effects() == ["a"]


def test_a_delivery_that_is_given_back_comes_again_without_a_retry_t11_t22(
    stage: Stage, broker: StubBroker
) -> None:
    # Given a key that another transaction holds, and an actor without retries
    backend = StubBackend()
    broker.add_middleware(Results(backend=backend))
    write = write_on(stage, broker, max_retries=0, store_results=True)
    message = write.send("a")
    with stage.rival() as rival, worker(broker):
        rival.execute(
            "INSERT INTO processed_messages VALUES ('write', %s, 'rival', '', 1)", (message.message_id,)
        )

        # When its delivery has come to nothing twice, and the key is free
        eventually(lambda: len(stage.seen("skipped")) >= 2)
        rival.connection.rollback()
        eventually(lambda: stage.seen("returned"))
        broker.join("default", timeout=10_000)

    # Then it took effect, was no dead letter, and its result is no None
    assert stage.effects() == ["a"]
    assert broker.dead_letters == stage.seen("raised") == []
    assert message.get_result(backend=backend) == "wrote a"


def test_another_payload_under_a_key_is_a_dead_letter_at_once(stage: Stage, broker: StubBroker) -> None:
    # Given two messages with one business key and different arguments
    write = write_on(stage, broker)
    for label in ("a", "b"):
        write.send_with_options(args=(label,), idempotency_key="one")
        # When they are performed
        perform(broker)

    # Then the second is a dead letter, and was not retried
    (dead,) = broker.dead_letters
    assert dead.args == ("b",)
    assert isinstance(dead._exception, PayloadMismatch)
    assert stage.effects() == ["a"]


def test_a_body_that_ends_its_transaction_is_a_dead_letter_at_once_t3(
    stage: Stage, broker: StubBroker
) -> None:
    # Given a body that commits
    @dramatiq.actor(broker=broker)
    def write(label: str) -> None:
        stage.effect(label)
        stage.database.commit()

    # When it is performed
    write.send("a")
    perform(broker)

    # Then it did not
    (dead,) = broker.dead_letters
    assert isinstance(dead._exception, TransactionEscaped)
    assert stage.stored() == ([], [])


def test_an_invalid_key_is_refused_where_it_is_sent_t13(stage: Stage, broker: StubBroker) -> None:
    with pytest.raises(InvalidKey):
        write_on(stage, broker).send_with_options(args=("a",), idempotency_key="")
    assert broker.queues["default"].qsize() == 0


def test_a_redelivery_sets_off_nothing_again_i5_t10(stage: Stage, broker: StubBroker) -> None:
    # Given an actor with a success callback and a next step
    calls: list[str] = []

    @dramatiq.actor(broker=broker, idempotency="off")
    def called_back(message: dict[str, Any], result: str) -> None:
        calls.append("callback")

    @dramatiq.actor(broker=broker, idempotency="off")
    def step(result: str = "") -> None:
        calls.append("step")

    write = write_on(stage, broker, on_success="called_back")
    pipeline = dramatiq.pipeline([write.message("a"), step.message()], broker=broker)

    # When its message comes three times
    pipeline.run()
    perform(broker)
    for _ in range(2):
        broker.enqueue(pipeline.messages[0])
    perform(broker)

    # Then each was set off once
    assert sorted(calls) == ["callback", "step"]
    assert stage.effects() == ["a"]


def test_middleware_that_comes_later_sees_every_delivery(stage: Stage, broker: StubBroker) -> None:
    # Given an application's own middleware, added after the actor
    write = write_on(stage, broker)
    seen: list[Message[Any]] = []

    class Own(dramatiq.Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            seen.append(message)

    broker.add_middleware(Own())

    # When a message comes twice
    message = write.message("a")
    for _ in range(2):
        broker.enqueue(message)
    perform(broker)

    # Then it saw both
    assert [one.message_id for one in seen] == [message.message_id] * 2


@pytest.mark.parametrize("failing", ["before_process_message", "after_process_message"])
def test_a_foreign_hook_that_fails_leaves_no_body_unprotected_t1(
    stage_with: Callable[..., Stage], failing: str
) -> None:
    # Given a middleware whose hook fails, before ours in the stack
    stage = stage_with()
    broker = StubBroker()

    def fail(*_arguments: Any, **_outcome: Any) -> None:
        raise ValueError("a bug")

    broken = dramatiq.Middleware()
    setattr(broken, failing, fail)
    broker.add_middleware(broken)
    broker.middleware.insert(0, broker.middleware.pop())
    broker.add_middleware(IdempotentConsumer(stage.inbox))

    # When a message comes three times
    message = write_on(stage, broker).message("a")
    for _ in range(3):
        broker.enqueue(message)
    perform(broker)

    # Then it took effect once, under its key
    assert stage.effects() == ["a"]
    assert stage.key_rows() == [("write", message.message_id)]
