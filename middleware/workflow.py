"""What became of a message: what set it off, what it set off, and how far each of them is.

Asked of the tables alone. Each row carries the id of the message that set its message off: in the ledger,
among the dead letters, and in the inbox, whose claim takes it over from the ledger's row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dramatiq import Message
from dramatiq.errors import DecodeError

from .errors import ConfigurationError
from .inbox import CANCELLED, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from .broker import DurableRedisBroker

#: More is not asked for; whoever sends a message for each of a million articles has no tree to look at.
MAX_STEPS = 1_000
#: A message that always sends the next one has a chain without end: so far it is followed up and down.
MAX_ABOVE, MAX_BELOW = 100, 150
#: The later steps of a pipeline stand in the message; a larger one is not read for them.
MAX_READ_BYTES = 65_536


@dataclass(frozen=True)
class Step:
    """One message of a workflow.

    Fields:
      consumer_name: whose it is; None where nothing is known of it.
      state: "waiting" until its time comes, "due", "published" (in Redis, or running), "done",
        "cancelled", "dead" (see its dead letter), "to come" (a later step of a pipeline), or "unknown": it
        was sent directly and is not done, or was answered as a duplicate by business key, or is forgotten.
      at: since when, by the database's clock; for one that waits, until when.
      sent_at: when it was sent, as far as the ledger knew; for a dead letter by the sender's clock.
      key: its business key, if it is done and had one.
      attempt: how often it was retried; None where that is not stored.
      reason: the last error of one that is dead, or why Redis refuses one that is due.
      sets_off: what it set off, the earliest first; complete: whether that is all.
    """

    message_id: str
    consumer_name: str | None = None
    state: str = "unknown"
    at: datetime | None = None
    parent_id: str | None = None
    sent_at: datetime | None = None
    key: str | None = None
    attempt: int | None = None
    reason: str | None = None
    sets_off: tuple[Step, ...] = ()
    complete: bool = True

    def __iter__(self) -> Iterator[Step]:
        """This step, and all below it, each before what it set off."""
        yield self
        for step in self.sets_off:
            yield from step


def workflow_of(broker: DurableRedisBroker, message_id: str) -> Step | None:
    """The whole workflow that a message belongs to.

    Arguments:
      broker: with a ledger.

    Returns:
      The step that began it, with all that followed, at most `MAX_STEPS`; one that is too far up has a
      `parent_id`. None if nothing is known of the message. Each statement sees a moment of its own, so
      a step may move on in between.
    """
    look = _Look(broker)
    seen: dict[str, list[Step]] = {}
    first = message_id
    while len(seen) < MAX_ABOVE:
        seen[first] = look.rows("id", [first])
        parent_id = next((step.parent_id for step in seen[first] if step.parent_id), None)
        if parent_id is None or parent_id in seen:
            break
        first = parent_id
    below = _Below(look, [first])
    known = seen.get(first) or look.rows("id", [first])
    if not known and not below.of.get(first):
        return None
    roots = [below.under(step) for step in known or [Step(first)]]
    # One id may stand for several consumers; what it set off is then shown once, below the first.
    return replace(roots[0], sets_off=(*roots[0].sets_off, *(replace(one, sets_off=()) for one in roots[1:])))


class _Below:
    """What messages set off, asked for one level after the other.

    Arguments:
      ids: of the messages at the top.
    """

    def __init__(self, look: _Look, ids: list[str]) -> None:
        self.of: dict[str, list[Step]] = {}
        self.open: set[str] = set()
        seen, count, depth = set(ids), 0, 0
        while ids:
            depth += 1
            found = look.rows("parent", ids, MAX_STEPS - count + 1)
            if count + len(found) > MAX_STEPS:
                self.open |= set(ids)
                found = found[: MAX_STEPS - count]
            count += len(found)
            for step in found:
                assert step.parent_id is not None
                self.of.setdefault(step.parent_id, []).append(step)
            ids = [step.message_id for step in found if step.message_id not in seen]
            if self.open or depth == MAX_BELOW:
                self.open |= set(ids)
                break
            seen.update(ids)

    def under(self, step: Step) -> Step:
        """The step with all that it set off."""
        followers = self.of.pop(step.message_id, [])
        ids = {one.message_id for one in followers}
        followers += [one for one in step.sets_off if one.message_id not in ids]
        complete = step.message_id not in self.open
        return replace(step, sets_off=tuple(map(self.under, followers)), complete=complete)


class _Look:
    """The one statement that finds messages in all three tables, by their ids or by what set them off."""

    def __init__(self, broker: DurableRedisBroker) -> None:
        ledger, inbox = broker.ledger, broker.guard.inbox
        if ledger is None:
            raise ConfigurationError(
                "Without a ledger no message knows what set it off: hand the broker ledger=(...)."
            )
        self.database = ledger.database
        self.consumers = {
            name: actor.options.get("consumer_name", name) for name, actor in broker.actors.items()
        }
        keys, owed, dead = table_of(inbox.model), ledger.table, table_of(ledger.dead_letters)
        # The index over keys begins with the consumer's name: with the few that there are it finds an id.
        names = (
            f"WITH RECURSIVE names AS (SELECT min(consumer_name) AS name FROM {keys} UNION ALL "
            f"SELECT (SELECT min(consumer_name) FROM {keys} WHERE consumer_name > name) FROM names "
            f"WHERE name IS NOT NULL) "
        )
        done = (
            f"SELECT performed_by AS id, consumer_name AS name, NULL, CASE digest_version "
            f"WHEN {CANCELLED} THEN 'cancelled' ELSE 'done' END, processed_at, parent_id, "
            f"sent_at AS sent, nullif(message_id, performed_by), NULL::int, NULL, NULL::bytea FROM {keys} "
        )
        rest = (
            f"UNION ALL SELECT message_id, NULL, actor_name, CASE WHEN published_at IS NOT NULL THEN "
            f"'published' WHEN due_at > clock_timestamp() THEN 'waiting' ELSE 'due' END, "
            f"coalesce(published_at, due_at), parent_id, sent_at, NULL, attempt, refused, "
            f"CASE WHEN octet_length(message) <= {MAX_READ_BYTES} THEN message END "
            f"FROM {owed} WHERE %(column)s = ANY(%%(ids)s) "
            f"UNION ALL SELECT message_id, consumer_name, actor_name, 'dead', died_at, parent_id, sent_at, "
            f"NULL, attempt, concat_ws(': ', reason, error_text), NULL FROM {dead} "
            f"WHERE %(column)s = ANY(%%(ids)s) ORDER BY sent, id LIMIT %%(limit)s"
        )
        self.texts = {
            "id": f"{names} {done} WHERE consumer_name = ANY(SELECT name FROM names) "
            f"AND message_id = ANY(%(ids)s) AND performed_by = message_id "
            f"UNION ALL {done} WHERE performed_by = ANY(%(ids)s) AND performed_by <> message_id "
            + rest
            % {"column": "message_id"},
            "parent": f"{done} WHERE parent_id = ANY(%(ids)s) " + rest % {"column": "parent_id"},
        }

    def rows(self, by: str, ids: list[str], limit: int = MAX_STEPS) -> list[Step]:
        """The messages with these ids, or that were set off by them (`by` "parent"); each once.

        A message that is done may have a row or a dead letter as well, if it was requeued: what is done
        counts, then what is still to be done.
        """
        found: dict[tuple[str, str | None], Step] = {}
        values = {"ids": ids, "limit": limit}
        for message_id, consumer, actor, state, *more, data in self.database.execute_sql(
            self.texts[by], values
        ):
            name = consumer or self.consumers.get(actor, actor)
            later = () if data is None else _to_come(data, self.consumers)
            at, parent_id, sent_at, key, attempt, reason = more
            step = Step(message_id, name, state, at, parent_id, sent_at, key, attempt, reason, later)
            other = found.get((message_id, name))
            if other is None or _rank(step) < _rank(other):
                found[message_id, name] = step
        return list(found.values())


def _rank(step: Step) -> int:
    return ("done", "cancelled", "published", "due", "waiting", "dead").index(step.state)


def _to_come(data: bytes, consumers: dict[str, str]) -> tuple[Step, ...]:
    """The next step of a pipeline that a message carries, with those after it below it."""
    steps: list[Step] = []
    try:
        options: Any = Message.decode(bytes(data)).options
        while (step := options.get("pipe_target")) is not None and len(steps) < MAX_ABOVE:
            name = step["actor_name"]
            steps.append(Step(step["message_id"], consumers.get(name, name), "to come"))
            options = step["options"]
    except (DecodeError, AttributeError, KeyError, TypeError):
        return ()  # what cannot be read will be a dead letter that says so
    later: tuple[Step, ...] = ()
    for one in reversed(steps):
        later = (replace(one, sets_off=later),)
    return later


def lines_of(step: Step, asked: str, depth: int = 0) -> Iterator[str]:
    """A workflow as lines for people: one for each message, below what set it off.

    Arguments:
      asked: the message that is marked.
    """
    mark = "> " if step.message_id == asked else "  "
    words = [step.consumer_name or "?", step.state]
    words += [step.at.isoformat(" ", "seconds")] if step.at else []
    words += [step.message_id]
    words += [f"key {step.key!r}"] if step.key else []
    words += [f"attempt {step.attempt}"] if step.attempt else []
    words += [f"({step.reason.splitlines()[0]})"] if step.reason else []
    yield mark + "  " * depth + "  ".join(map(_shown, words))
    for one in step.sets_off:
        yield from lines_of(one, asked, depth + 1)
    if not step.complete:
        yield "  " + "  " * (depth + 1) + "... and more"


def _shown(text: str) -> str:
    """A text that does nothing to a terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
