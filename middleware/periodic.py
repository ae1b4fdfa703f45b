"""Periodic actors: one message for each tick of a cron expression, however many processes look.

Each worker process looks once a second. A row of `ticks` says how far a consumer has come. Whoever
moves it on sends the message of that tick in the same transaction, under an id that is derived from
the two (T24): it leaves with the commit, once.

Every process ticks by the expression that its own code declares. Old and new workers that run side by
side move the same row, and only forward: each sends its ticks, and a tick that they share is sent once.
"""

from __future__ import annotations

import inspect
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

import peewee
import psycopg2

from .ends import SQLSTATES_AT_BEGIN, End, look_up, sqlstate_of
from .errors import ConfigurationError
from .identity import derived_id
from .inbox import table_of
from .outage import Outage

if TYPE_CHECKING:
    from threading import Event

    from dramatiq import Actor, Broker

    from .broker import DurableRedisBroker
    from .ledger import Ledger

LOOK_S = 1.0
FIELDS = 5


class Schedule(NamedTuple):
    """When a periodic actor ticks: a cron expression, read in a time zone."""

    expression: str
    zone: ZoneInfo

    def __str__(self) -> str:
        return f"{' '.join(self.expression.split())} {self.zone.key}"

    def latest(self, since: datetime, now: datetime) -> datetime | None:
        """The latest tick after one moment and not after another, in UTC; None if there is none."""
        from cronsim import CronSim

        back = next(CronSim(self.expression, now.astimezone(self.zone), reverse=True), None)
        # In UTC: Python compares two times of one zone by their hands, also where the hour comes twice.
        latest = max(since, back or since).astimezone(UTC)
        # From the second of those hours CronSim does not look back into the first.
        for tick in CronSim(self.expression, latest.astimezone(self.zone)):
            if tick.astimezone(UTC) > now:
                break
            latest = max(latest, tick.astimezone(UTC))
        return latest if latest > since else None


def check_periodic(actor: Actor[Any, Any]) -> None:
    """An actor whose options `periodic` and `timezone` can be followed passes, or one that has neither.

    Raises:
      ConfigurationError: says what to change.
    """
    name, expression = actor.actor_name, actor.options.get("periodic")
    if expression is None:
        if actor.options.get("timezone") is not None:
            raise ConfigurationError(
                f"Actor {name!r} has a timezone and is not periodic: add periodic=, or drop the timezone."
            )
        return
    zone = _zone_of(actor)
    try:
        import cronsim
    except ImportError:
        raise ConfigurationError(
            f"Actor {name!r} is periodic, which needs the package cronsim: pip install onetake[periodic]"
        ) from None
    try:
        if not isinstance(expression, str) or len(expression.split()) != FIELDS:
            raise ValueError("it has not five fields")
        if next(cronsim.CronSim(expression, datetime.now(zone)), None) is None:
            raise ValueError("it never comes due")
    except (cronsim.CronSimError, ValueError) as error:
        raise ConfigurationError(
            f"Actor {name!r}: periodic is {expression!r}, and {error}; it must be a cron expression of "
            f'five fields (minute, hour, day, month, day of week) such as "*/5 * * * *".'
        ) from None
    try:
        inspect.signature(actor.fn).bind()
    except TypeError as error:
        raise ConfigurationError(
            f"Actor {name!r} is periodic, and a tick brings no arguments ({error}): give its parameters "
            f"defaults."
        ) from None


def _zone_of(actor: Actor[Any, Any]) -> ZoneInfo:
    name = actor.options.get("timezone") or "UTC"
    try:
        return ZoneInfo(name)
    except (LookupError, OSError, TypeError, ValueError):
        raise ConfigurationError(
            f"Actor {actor.actor_name!r}: timezone is {name!r}, which is not known here; it must be an IANA "
            f'name such as "Europe/Berlin". Where a machine has no zones, pip install onetake[periodic].'
        ) from None


class Periodic(NamedTuple):
    """A periodic actor, and what the log says if its ticks cannot be sent."""

    actor: Actor[Any, Any]
    schedule: Schedule
    trouble: Outage


def periodic_actors(broker: Broker) -> dict[str, Periodic]:
    """The periodic actors of a broker by their consumer names.

    Raises:
      ConfigurationError: the broker has no ledger to hold their ticks, or two have one consumer name.
    """
    found: dict[str, Periodic] = {}
    for actor in broker.actors.values():
        if actor.options.get("periodic") is None:
            continue
        name = actor.options.get("consumer_name", actor.actor_name)
        if name in found:
            raise ConfigurationError(
                f"Actors {found[name].actor.actor_name!r} and {actor.actor_name!r} are both periodic, and "
                f"both are consumer {name!r}: give each a consumer_name of its own."
            )
        schedule = Schedule(actor.options["periodic"], _zone_of(actor))
        trouble = Outage(f"Periodic actor {name!r}", "Its tick is tried again each second")
        found[name] = Periodic(actor, schedule, trouble)
    if found and getattr(broker, "ledger", None) is None:
        raise ConfigurationError(
            f"Actor {next(iter(found.values())).actor.actor_name!r} is periodic, and there is no ledger to "
            f"hold its ticks: use a DurableRedisBroker with ledger=(...)."
        )
    return found


class Ticker:
    """What sends the ticks of a broker's periodic actors; any number may run at once.

    Arguments:
      broker: with a ledger.
    """

    def __init__(self, broker: DurableRedisBroker, ledger: Ledger) -> None:
        self.broker = broker
        self.database = ledger.database
        self.actors = periodic_actors(broker)
        self._declared: set[str] = set()
        table = table_of(ledger.ticks)
        self.select = (
            f"SELECT now, consumer_name, ticked_at FROM (SELECT now()) clock "
            f"LEFT JOIN {table} ON consumer_name = ANY(%s)"
        )
        self.declare = (
            f"INSERT INTO {table} AS known (consumer_name, expression, ticked_at) VALUES (%s, %s, now()) "
            f"ON CONFLICT (consumer_name) DO UPDATE SET expression = excluded.expression, "
            f"ticked_at = greatest(known.ticked_at, excluded.ticked_at) "
            f"WHERE known.expression <> excluded.expression"
        )
        self.move = f"UPDATE {table} SET ticked_at = %s WHERE consumer_name = %s AND ticked_at < %s"

    def run(self, stopping: Event) -> None:
        """Send what is due, once a second until `stopping` is set, by the database's clock."""
        while not stopping.is_set():
            self.broker.guard.insist(self.look)
            stopping.wait(LOOK_S)
        self.database.discard()

    def look(self) -> None:
        """Send for each periodic actor the latest tick that is due, if one is."""
        rows = self.database.execute_sql(self.select, (list(self.actors),)).fetchall()
        ticked_at = {name: moment for _, name, moment in rows}
        for name, (_, _, trouble) in self.actors.items():
            try:
                self._look_at(name, ticked_at.get(name), rows[0][0])
            except Exception as error:
                end = _end_of(error)
                if end is End.WAIT:
                    raise
                if end is End.FAIL:  # else another process is at it
                    trouble.begins(error)
            else:
                trouble.ends()

    def _look_at(self, name: str, ticked_at: datetime | None, now: datetime) -> None:
        if ticked_at is None or name not in self._declared:
            # The first look of this process. Of an expression that is new only what comes now counts.
            schedule = self.actors[name].schedule
            self.database.execute_sql(self.declare, (name, str(schedule)))
            self._declared.add(name)
            return
        tick = self.actors[name].schedule.latest(ticked_at, now)
        if tick is not None:
            self._send(name, tick)

    def _send(self, name: str, tick: datetime) -> None:
        actor, schedule, _ = self.actors[name]
        message = actor.message_with_options(tick=tick.astimezone(schedule.zone).isoformat())
        with self.database.atomic():
            if self.database.execute_sql(self.move, (tick, name, tick)).rowcount:
                self.broker.enqueue(message._replace(message_id=derived_id(name, tick.isoformat())))


def _end_of(error: Exception) -> End:
    if not isinstance(error, peewee.PeeweeException | psycopg2.Error):
        return End.FAIL
    return look_up(SQLSTATES_AT_BEGIN, sqlstate_of(error), End.WAIT)
