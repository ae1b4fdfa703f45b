"""Whatever happens in whatever order: afterwards the database equals the model (I1, I3, I7)."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any

import psycopg2
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from models import database

from .processes import Kind, eventually
from .property_actors import broker, child_of, place_order, stumble_and_send, write, write_and_send
from .property_world import KINDS, Loss, World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dramatiq import Actor, Message

    from .servers import Servers

#: About a minute.
EXAMPLES, STEPS = 20, 16
#: What a killed worker had is missed after a second, what Redis has lost is found after three.
SETTLE_S = 30

ACTORS: list[Actor[[str], None]] = [write, write_and_send, stumble_and_send]

_numbers = count(1)


class Fate(Enum):
    """How often a label may take effect."""

    ONCE = "once"
    #: It was in Redis alone when Redis lost it: at most once.
    PERHAPS = "perhaps"
    NEVER = "never"


class ChangeOfMindError(Exception):
    """The application rolls a transaction or a savepoint back."""


@dataclass
class Sent:
    """A message that an application sends inside a block, or a change that it makes there."""

    actor: Actor[[str], None] | None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Block:
    """A transaction, or inside another block a savepoint."""

    parts: list[Sent | Block]
    commits: bool


sends = st.builds(
    Sent,
    st.sampled_from(ACTORS),
    st.sampled_from([{}, {}, {"delay": 0}, {"delay": 50}, {"outbox": False}]),
)
losses = st.sampled_from(["everything", "everything", "its lists", "its messages"])
changes = st.builds(Sent, st.none())
outcomes = st.sampled_from([True, True, False])
blocks = st.recursive(
    st.builds(Block, st.lists(sends | changes, min_size=1, max_size=5), outcomes),
    lambda inner: st.builds(Block, st.lists(inner | sends, min_size=1, max_size=4), outcomes),
    max_leaves=4,
)


class Application(RuleBasedStateMachine):
    """An application that sends, processes that die, and a model of what must come of it."""

    messages = Bundle("messages")
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.fates: dict[str, Fate] = {}
        #: Labels of messages that send another one.
        self.parents: set[str] = set()
        #: Labels of messages of which, as far as is known, Redis alone knows.
        self.loose: set[str] = set()

    # The application sends

    @initialize(target=messages)
    def begin(self) -> Any:
        """Every example begins with work for everybody."""
        sent = [self._send_outside(actor) for actor in ACTORS]
        parts: list[Sent | Block] = [Sent(actor) for actor in ACTORS]
        return multiple(*sent, *self._perform(Block(parts, commits=True)))

    @rule(target=messages, actor=st.sampled_from(ACTORS), number=st.integers(1, 5))
    def send_outside(self, actor: Actor[[str], None], number: int) -> Any:
        return multiple(*(self._send_outside(actor) for _ in range(number)))

    @rule(target=messages, block=blocks)
    def send_in_a_transaction(self, block: Block) -> Any:
        return multiple(*self._perform(block))

    @rule(target=messages, actor=st.sampled_from(ACTORS), commits=outcomes)
    def send_on_another_connection(self, actor: Actor[[str], None], commits: bool) -> Any:
        message = actor.message(f"message {next(_numbers)}")
        with closing(psycopg2.connect(self.world.servers.postgres.url)) as connection:
            broker.enqueue_on(connection, message)
            connection.commit() if commits else connection.rollback()
        self._expect(message, Fate.ONCE if commits else Fate.NEVER)
        return message if commits else multiple()

    @rule(message=messages, copies=st.integers(1, 3))
    def deliver_again(self, message: Message[Any], copies: int) -> None:
        """A sender repeats what it has sent."""
        for _ in range(copies):
            broker.enqueue(message)
        label = message.args[0]
        if self.fates[label] is Fate.PERHAPS:
            self._expect(message, Fate.ONCE)
            self.loose.add(label)

    # What goes wrong

    @rule(kind=st.sampled_from(KINDS))
    def kill_a_worker(self, kind: Kind) -> None:
        self.world.kill_worker(kind)

    @rule()
    def kill_the_relay(self) -> None:
        self.world.kill_relay()

    @rule(what=losses)
    def redis_loses(self, what: Loss) -> None:
        lost = set() if what == "its lists" else self.loose - self.world.known_to_postgresql()
        self.world.lose(what)
        self.fates |= dict.fromkeys(lost, Fate.PERHAPS)
        if what != "its lists":
            self.loose.clear()

    @rule(target=messages, what=losses, block=blocks, actor=st.sampled_from(ACTORS))
    def redis_loses_what_was_just_sent(self, what: Loss, block: Block, actor: Actor[[str], None]) -> Any:
        with self.world.workers_stand_still():
            sent = [self._send_outside(actor), *self._perform(block)]
            self.redis_loses(what)
        return multiple(*sent)

    # The model

    def _send_outside(self, actor: Actor[[str], None], **options: Any) -> Message[Any]:
        message = actor.send_with_options(args=(f"message {next(_numbers)}",), **options)
        self._expect(message, Fate.ONCE)
        self.loose.add(message.args[0])
        return message

    def _expect(self, message: Message[Any], fate: Fate) -> None:
        label = message.args[0]
        self.fates[label] = fate
        if message.actor_name != write.actor_name:
            self.parents.add(label)

    def _perform(self, block: Block) -> list[Message[Any]]:
        """Do what a block says; returns the messages that left, at once or with its commit."""
        at_once, waiting, placed = self._enter(block)
        for message in waiting:
            self._expect(message, Fate.ONCE)
        self.fates |= dict.fromkeys(placed, Fate.ONCE)
        return at_once + waiting

    def _enter(self, block: Block) -> tuple[list[Message[Any]], list[Message[Any]], list[str]]:
        """Do what a block says, in a transaction or savepoint of its own.

        Returns:
          Messages that were sent at once; then messages and changes that share the fate of what
          is around the block.
        """
        at_once: list[Message[Any]] = []
        waiting: list[Message[Any]] = []
        placed: list[str] = []
        with suppress(ChangeOfMindError), database.atomic():
            for part in block.parts:
                if isinstance(part, Block):
                    left, inner, inner_placed = self._enter(part)
                    at_once += left
                    waiting += inner
                    placed += inner_placed
                elif part.actor is None:
                    placed.append(f"order {next(_numbers)}")
                    place_order(placed[-1])
                elif part.options.get("outbox") is False:
                    at_once.append(self._send_outside(part.actor, **part.options))
                else:
                    label = f"message {next(_numbers)}"
                    waiting.append(part.actor.send_with_options(args=(label,), **part.options))
            if not block.commits:
                raise ChangeOfMindError
        if block.commits:
            return at_once, waiting, placed
        for message in waiting:
            self._expect(message, Fate.NEVER)
        self.fates |= dict.fromkeys(placed, Fate.NEVER)
        return at_once, [], []

    def differences(self) -> list[str]:
        """In what the database differs from the model."""
        effects = self.world.effects()
        found = []
        for label, fate in self.fates.items():
            times, wanted = effects.get(label, 0), {Fate.ONCE: {1}, Fate.PERHAPS: {0, 1}, Fate.NEVER: {0}}
            if times not in wanted[fate]:
                found.append(f"{label!r} took effect {times} times, and should {fate.value}")
            children = effects.get(child_of(label), 0)
            if label in self.parents and children != times:
                found.append(f"{label!r} took effect {times} times, what it sent {children} times")
        return found + [
            f"{label!r} took effect {times} times" for label, times in effects.items() if times > 1
        ]

    def teardown(self) -> None:
        database.close()
        eventually(
            lambda: self.world.is_at_rest() and not self.differences(),
            SETTLE_S,
            what=lambda: f"{self.differences()}\n{self.world.dead_letters()}\n{self.world.story()}",
        )
        assert self.world.dead_letters() == []
        effects = [label for label in self.world.effects() if label.startswith("message")]
        assert self.world.pieces_taken() == len(effects)


@pytest.fixture
def world(clean: Servers, tmp_path: Path) -> Iterator[World]:
    """The processes under test, for all examples of a test."""
    world = World(clean, tmp_path)
    yield world
    world.close()


@pytest.mark.timeout(300)
def test_whatever_happens_in_whatever_order_the_database_equals_the_model(
    world: World, request: pytest.FixtureRequest
) -> None:
    """I1, I3 and I7 at once.

    The examples are the same in every run, unless pytest is given a --hypothesis-seed. Hypothesis prints
    the steps of one that fails, and it is not made smaller: each try takes seconds.
    """
    # Given processes that live on from example to example
    Application.world = world

    # When an application sends and things go wrong, then what is found agrees with the model
    run_state_machine_as_test(
        Application,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=request.config.getoption("--hypothesis-seed") is None,
            database=None,
            phases=[Phase.generate],
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )

    # And nothing came later than that
    assert {label: times for label, times in world.effects().items() if times > 1} == {}
