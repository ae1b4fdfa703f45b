"""A redelivery sets off nothing again: no callback, no next step, no member of a group (I5, T10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dramatiq
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend as RateLimiterBackend

from .processes import eventually

if TYPE_CHECKING:
    from .stage import Stage

pytest_plugins = ("tests.stage",)


def test_a_redelivery_sends_no_success_callback_again_i5_t10(stage: Stage) -> None:
    # Given an actor with a callback, on the actor itself, which is no option of the message (T24)
    @stage.actor()
    def ship(message: dict[str, Any], result: str) -> None:
        stage.effect(f"shipped {result}")

    @stage.actor(on_success="ship")
    def pay() -> str:
        return "receipt"

    # When its message is performed, and comes twice more
    with stage.worker():
        message = pay.send()
        eventually(stage.effects)
        for _ in range(2):
            stage.broker.enqueue(message)
        eventually(lambda: len(stage.seen("returned")) == 4)
        stage.expect_in_redis()

    # Then the callback was sent once
    assert stage.effects() == ["shipped receipt"]
    assert [consumer for consumer, _ in stage.key_rows()] == ["pay", "ship"]


def test_a_redelivery_does_not_set_off_the_next_step_of_a_pipeline_again_i5_t10(stage: Stage) -> None:
    # Given a pipeline that has run
    deliveries: list[str] = []

    @stage.actor()
    def pay() -> str:
        return "receipt"

    @stage.actor(idempotency="off")
    def ship(result: str) -> None:
        deliveries.append(result)

    pipeline = dramatiq.pipeline([pay.message(), ship.message()], broker=stage.broker)
    with stage.worker():
        pipeline.run()
        eventually(lambda: deliveries)

        # When its first step comes again
        stage.broker.enqueue(pipeline.messages[0])
        eventually(lambda: len(stage.seen("returned")) == 3)
        stage.expect_in_redis()

    # Then the second was set off once
    assert deliveries == ["receipt"]


def test_another_message_with_a_business_key_sets_off_its_own_next_step_i5(stage: Stage) -> None:
    # Given a business key whose work is done
    shipped: list[str] = []

    @stage.actor()
    def pay() -> str:
        stage.effect("paid")
        return "receipt"

    @stage.actor(idempotency="off")
    def ship(parcel: str, result: str) -> None:
        shipped.append(f"{parcel}: {result}")

    with stage.worker():
        pay.send_with_options(idempotency_key="order-1")
        stage.expect_in_redis()

        # When another message under the key is the first step of a pipeline
        second = pay.message_with_options(idempotency_key="order-1")
        dramatiq.pipeline([second, ship.message("parcel 2")], broker=stage.broker).run()

        # Then that pipeline goes on, with the stored result
        eventually(lambda: shipped)
        stage.expect_in_redis()
    assert shipped == ["parcel 2: receipt"]
    assert stage.effects() == ["paid"]


def test_a_redelivery_of_a_group_member_is_not_counted_again_i5_t10(stage: Stage) -> None:
    # Given a group of two, of which one member is held up
    stage.broker.add_middleware(GroupCallbacks(RateLimiterBackend(client=stage.redis)))

    @stage.actor()
    def done() -> None:
        stage.effect("done")

    @stage.actor()
    def pay(label: str) -> None:
        stage.database.execute_sql("SELECT 1 FROM held FOR UPDATE" if label == "late" else "SELECT 1")
        stage.effect(label)

    stage.sql("CREATE TABLE held AS SELECT 1")
    members = [pay.message("early"), pay.message("late")]
    group = dramatiq.group(members, broker=stage.broker)
    group.add_completion_callback(done.message())
    with stage.rival() as rival, stage.worker():
        rival.execute("SELECT 1 FROM held FOR UPDATE")
        early = next(one for one in group.run().children if one.args == ("early",))
        eventually(lambda: stage.effects() == ["early"])

        # When the other one comes again
        stage.broker.enqueue(early)
        eventually(lambda: len(stage.seen("returned")) == 2)

        # Then the group is not complete
        assert stage.effects() == ["early"]
        # Until both have taken effect
        rival.connection.rollback()
        eventually(lambda: stage.effects() == ["done", "early", "late"])
        stage.expect_in_redis()
    assert [consumer for consumer, _ in stage.key_rows()] == ["done", "pay", "pay"]
