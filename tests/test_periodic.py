"""Periodic actors: one message for each tick and consumer, however many processes look."""

from __future__ import annotations

import logging
import sys
import threading
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, Middleware, MiddlewareError

from middleware import Database, DurableRedisBroker, IdempotentConsumer, tables
from middleware.errors import ConfigurationError
from middleware.identity import derived_id
from middleware.periodic import Schedule, Ticker

from .processes import eventually
from .stage import NAMESPACE, inbox_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .ledger_stage import LedgerStage
    from .processes import WorkerProcess
    from .stage import Stage

pytest_plugins = ("tests.ledger_stage",)

#: Its latest tick is always a while ago, and the next always a while to come.
DAILY = "0 0 * * *"
BERLIN = ZoneInfo("Europe/Berlin")
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


class Gate(Middleware):
    """Counts what is enqueued, and does what a test wants meanwhile."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.meanwhile: Callable[[], object] = bool

    def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        self.sent.append(message.message_id)
        self.meanwhile()


class Process:
    """What a worker process has for its ticks: broker, database and declared actors of its own."""

    def __init__(self, stage: LedgerStage, expression: str = DAILY, *others: str, **options: Any) -> None:
        self.stage = stage
        self.database = Database(stage.url(), lock_timeout_ms=5_000)
        models = tables.on(self.database)
        self.broker = DurableRedisBroker(url=stage.servers.redis.url, namespace=NAMESPACE, ledger=models)
        self.broker.add_middleware(IdempotentConsumer(models.ProcessedMessage))
        self.gate = Gate()
        self.broker.add_middleware(self.gate)
        for name in ("report", *others):
            declare: Any = dramatiq.actor(
                broker=self.broker,
                actor_name=name,
                periodic=expression,
                **{"timezone": "Europe/Berlin", **options},
            )
            declare(lambda: None)
        assert self.broker.ledger is not None
        self.ticker = Ticker(self.broker, self.broker.ledger)

    def looks(self) -> None:
        """One look, as each second brings one."""
        self.ticker.look()
        self.database.close()


@pytest.fixture
def process(ledger: LedgerStage) -> Iterator[Callable[..., Process]]:
    """Makes what a worker process has, with the arguments of `Process`; it has looked once."""
    made: list[Process] = []

    def make(*arguments: Any, **options: Any) -> Process:
        made.append(Process(ledger, *arguments, **options))
        made[-1].looks()
        return made[-1]

    yield make
    for one in made:
        one.broker.client.close()


def set_back(stage: LedgerStage, days: int = 2) -> None:
    """As if no process had looked for so long."""
    stage.sql("UPDATE ticks SET ticked_at = now() - make_interval(days => %s)", days)


def ticks(stage: LedgerStage) -> dict[str, tuple[Any, ...]]:
    """By which expression each consumer ticks, and how far it has come."""
    return {name: tuple(rest) for name, *rest in stage.sql("SELECT * FROM ticks")}


def midnight(stage: LedgerStage) -> datetime:
    """The latest tick of DAILY, by the database's clock."""
    ((moment,),) = stage.sql("SELECT date_trunc('day', now() AT TIME ZONE 'Europe/Berlin')")
    return moment.replace(tzinfo=BERLIN)  # type: ignore[no-any-return]


# One message


def test_a_tick_is_one_message_whose_id_is_derived_from_the_consumer_and_the_tick(
    ledger: LedgerStage, process: Callable[..., Process]
) -> None:
    # Given a periodic actor that has missed a tick
    one = process(consumer_name="reports")
    set_back(ledger)

    # When its process looks, and looks again
    one.looks()
    one.looks()

    # Then there is one message, and it says which tick it is of
    tick = midnight(ledger)
    message = ledger.row().message
    assert message.message_id == derived_id("reports", tick.astimezone(UTC).isoformat())
    assert message.options["tick"] == tick.isoformat()
    assert message.options["tick"].endswith(("+01:00", "+02:00"))
    assert (message.args, message.kwargs) == ((), {})
    assert ticks(ledger) == {"reports": (f"{DAILY} Europe/Berlin", tick)}
    assert ledger.sql("SELECT parent_id FROM outbox_messages") == [(None,)]


def test_a_tick_is_sent_once_however_many_processes_look_at_the_same_moment(
    ledger: LedgerStage, process: Callable[..., Process]
) -> None:
    # Given processes that all see a tick that is due, and can do nothing about it yet
    crew = [process() for _ in range(4)]
    set_back(ledger)
    threads = [Thread(target=one.looks) for one in crew]
    with ledger.rival() as rival:
        rival.execute("SELECT * FROM ticks FOR UPDATE")
        for thread in threads:
            thread.start()
        eventually(lambda: ledger.sql(WAITING) == [(len(crew),)])

    # When all of them can
    for thread in threads:
        thread.join()

    # Then one has sent it
    assert [sent for one in crew for sent in one.gate.sent] == ledger.owed()
    assert len(ledger.owed()) == 1


def test_worker_processes_of_threads_and_of_greenlets_send_a_tick_once(
    ledger: LedgerStage, worker_process: Callable[..., WorkerProcess]
) -> None:
    # Given a worker of each kind, the first of two processes
    env = {"DATABASE_URL": ledger.url()}
    threads = worker_process(module="tests.periodic_actors", processes=2, threads=1, env=env)
    greenlets = worker_process(module="tests.periodic_actors", kind="gevent", threads=1, env=env)
    eventually(lambda: ticks(ledger), what=lambda: threads.output() + greenlets.output())

    # When a tick is due
    set_back(ledger)

    # Then it takes effect once
    once = [derived_id("report", midnight(ledger).astimezone(UTC).isoformat())]
    eventually(lambda: ledger.done() == once, what=lambda: threads.output() + greenlets.output())
    ledger.expect_settled()
    assert ledger.effects() == ["reported"]

    # And when one of greenlets alone finds the same tick, as after a restored backup, its id is the same
    threads.terminate()
    threads.wait()
    assert "Duplicate answered" not in greenlets.output()
    set_back(ledger)
    eventually(lambda: "Duplicate answered" in greenlets.output(), what=greenlets.output)
    assert ledger.effects() == ["reported"]


# Which ticks


def test_an_actor_that_was_never_seen_waits_for_its_next_tick(
    ledger: LedgerStage, process: Callable[..., Process]
) -> None:
    # Given an actor that is new
    one = process("* * * * *")

    # When its process goes on looking
    one.looks()

    # Then it is remembered, and nothing is sent for the minutes before
    assert list(ticks(ledger)) == ["report"]
    (first_seen,) = [moment for _, moment in ticks(ledger).values()]
    assert all(row.message.options["tick"] > first_seen.isoformat() for row in ledger.rows())


def test_after_an_outage_only_the_latest_missed_tick_is_sent(
    ledger: LedgerStage, process: Callable[..., Process]
) -> None:
    # Given an actor of which nobody sent the ticks of a month
    process()
    set_back(ledger, days=30)

    # When a process starts, and looks now and then
    again = process()
    again.looks()
    again.looks()

    # Then the latest is sent
    assert ledger.row().message.options["tick"] == midnight(ledger).isoformat()
    assert len(again.gate.sent) == 1


def test_another_expression_takes_effect_at_its_next_tick(
    ledger: LedgerStage, process: Callable[..., Process]
) -> None:
    # Given an actor that has missed ticks by its old expression and by its new one
    process("0 1 * * *")
    set_back(ledger)

    # When processes with the new one start
    new, another = process(), process()
    for one in (new, another, new):
        one.looks()

    # Then nothing is sent for what lies in the past
    assert ledger.rows() == []
    assert ticks(ledger)["report"][0] == f"{DAILY} Europe/Berlin"
    assert midnight(ledger) < ticks(ledger)["report"][1]

    # And when the next tick comes, it is sent
    set_back(ledger, days=1)
    another.looks()
    assert ledger.row().message.options["tick"] == midnight(ledger).isoformat()


def test_another_time_zone_is_another_expression(
    ledger: LedgerStage, process: Callable[..., Process]
) -> None:
    # Given an actor that is due in its new zone; when a process with that starts
    process(timezone="Asia/Tokyo")
    set_back(ledger)
    process().looks()

    # Then nothing is sent
    assert ledger.rows() == []
    assert ticks(ledger)["report"][0] == f"{DAILY} Europe/Berlin"


def test_old_and_new_expressions_that_run_side_by_side_send_each_moment_once(
    ledger: LedgerStage, process: Callable[..., Process]
) -> None:
    # Given a process with an expression, and a later one with another; a tick is due that both have
    old, new = process("0 0 * * *"), process("0 0 */1 * *")
    set_back(ledger)

    # When they look by turns
    for one in (old, new, old, new):
        one.looks()

    # Then it was sent once
    assert old.gate.sent + new.gate.sent == ledger.owed()
    assert len(ledger.owed()) == 1

    # And the later expression stays
    assert ticks(ledger)["report"][0].startswith("0 0 */1 * *")

    # And a tick of the old alone is sent too: its processes may be all that there is
    lone = process("* * * * *")
    old.looks()
    ledger.sql("UPDATE ticks SET ticked_at = now() - interval '2 minutes'")
    new.looks()
    lone.looks()
    assert len(lone.gate.sent) == 1


def moment(text: str, zone: str = "Europe/Berlin") -> datetime:
    """A moment in a zone; with ``*`` the second of two with the same hands."""
    return datetime.fromisoformat(text.rstrip("*")).replace(tzinfo=ZoneInfo(zone), fold=text.endswith("*"))


@pytest.mark.parametrize(
    ("expression", "zone", "since", "now", "tick"),
    [
        # Seconds count, and the moment itself does.
        ("*/5 * * * *", "UTC", "2026-01-01 12:00", "2026-01-01 12:04:59", None),
        ("*/5 * * * *", "UTC", "2026-01-01 12:00", "2026-01-01 12:05", "2026-01-01 12:05"),
        ("*/5 * * * *", "UTC", "2026-01-01 12:05", "2026-01-01 12:05:01", None),
        ("*/5 * * * *", "UTC", "2026-01-01 12:00", "2026-01-01 14:02", "2026-01-01 14:00"),
        ("0 3 29 2 *", "UTC", "2021-01-01 12:00", "2026-01-01 12:00", "2024-02-29 03:00"),
        # Summer and winter.
        ("0 3 * * *", "Europe/Berlin", "2026-01-01 02:00", "2026-01-01 04:00", "2026-01-01 03:00"),
        ("0 3 * * *", "Europe/Berlin", "2026-07-01 02:00", "2026-07-01 04:00", "2026-07-01 03:00"),
        # In spring the clock goes from 2 to 3: what would come in between comes at 3.
        ("30 2 * * *", "Europe/Berlin", "2026-03-29 01:59", "2026-03-29 03:00", "2026-03-29 03:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-03-29 03:00", "2026-03-29 03:45", None),
        ("*/30 * * * *", "Europe/Berlin", "2026-03-29 01:45", "2026-03-29 03:10", "2026-03-29 03:00"),
        # In autumn the hour from 2 to 3 comes twice: what has an hour comes in the first.
        ("30 2 * * *", "Europe/Berlin", "2026-10-25 01:00", "2026-10-25 02:29", None),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25 01:00", "2026-10-25 02:31", "2026-10-25 02:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25 02:30", "2026-10-25 02:59*", None),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25 01:00", "2026-10-25 02:10*", "2026-10-25 02:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25 02:10*", "2026-10-25 04:00", None),
        ("15,45 2 * * *", "Europe/Berlin", "2026-10-24 12:00", "2026-10-25 02:30*", "2026-10-25 02:45"),
        # What has none comes in both.
        ("*/30 * * * *", "Europe/Berlin", "2026-10-25 02:30", "2026-10-25 02:10*", "2026-10-25 02:00*"),
        ("*/30 * * * *", "Europe/Berlin", "2026-10-25 02:00*", "2026-10-25 02:40*", "2026-10-25 02:30*"),
    ],
)  # fmt: skip
def test_the_latest_tick_is_found_also_when_the_clock_is_changed(
    expression: str, zone: str, since: str, now: str, tick: str | None
) -> None:
    # Given a schedule; when its latest tick between two moments is looked for
    schedule = Schedule(expression, ZoneInfo(zone))
    found = schedule.latest(moment(since, zone).astimezone(UTC), moment(now, zone).astimezone(UTC))

    # Then it is this
    assert found == (None if tick is None else moment(tick, zone).astimezone(UTC))


def test_a_day_with_a_change_of_the_clock_has_each_tick_once() -> None:
    # Given an actor that ticks each half hour, and one with an hour of its own
    half_hours, at_night = Schedule("*/30 * * * *", BERLIN), Schedule("30 2 * * *", BERLIN)
    for day, count in (("2026-03-29", 46), ("2026-10-25", 50)):
        # When its process looks each minute of a day on which the clock is changed
        start, end = moment(day), moment(day) + timedelta(days=1)
        seconds = int((end.astimezone(UTC) - start.astimezone(UTC)).total_seconds())
        found: dict[Schedule, list[datetime]] = {half_hours: [], at_night: []}
        for schedule, its in found.items():
            ticked_at = start.astimezone(UTC)
            for second in range(60, seconds + 1, 60):
                tick = schedule.latest(ticked_at, start.astimezone(UTC) + timedelta(seconds=second))
                if tick is not None:
                    ticked_at = tick
                    its.append(tick)
        # Then the one has a tick for each, and the other one
        assert len(set(found[half_hours])) == len(found[half_hours]) == count
        assert len(found[at_night]) == 1


# Trouble


@pytest.mark.parametrize("trouble", ["refused", "cut off"])
def test_a_tick_and_its_message_are_one_transaction(
    trouble: str, ledger: LedgerStage, process: Callable[..., Process], caplog: pytest.LogCaptureFixture
) -> None:
    # Given a process that has moved the row and comes to grief before it has sent the message
    one = process()
    set_back(ledger)
    before = ticks(ledger)
    halfway: list[object] = []

    def come_to_grief() -> None:
        if len(halfway) < 2:
            halfway.append(ticks(ledger))
            if trouble == "refused":
                raise MiddlewareError("no")
            one.database.execute_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    one.gate.meanwhile = come_to_grief
    over = Event()
    caplog.set_level(logging.INFO, "onetake")
    thread = Thread(target=one.ticker.run, args=(over,))

    # When its thread goes on
    thread.start()
    try:
        eventually(ledger.rows)
    finally:
        over.set()
        thread.join()

    # Then neither was stored without the other; the thread said so once, and lives
    assert halfway == [before, before]
    assert ledger.owed() == one.gate.sent[-1:]
    assert len(one.gate.sent) == 3
    who = "Periodic actor 'report'" if trouble == "refused" else "PostgreSQL"
    said = [record.getMessage() for record in caplog.records if record.name == "onetake"]
    assert [text.partition(" ca")[0] for text in said] == [who, who], said


def test_a_row_that_somebody_holds_stops_no_other_actor(
    ledger: LedgerStage, process: Callable[..., Process], caplog: pytest.LogCaptureFixture
) -> None:
    # Given two actors that are due, and a stopped process that holds the row of the first
    one = process(DAILY, "other")
    one.database.lock_timeout_ms = 100
    one.database.close()
    set_back(ledger)
    with ledger.rival() as rival:
        rival.execute("SELECT * FROM ticks WHERE consumer_name = 'report' FOR UPDATE")
        # When a process looks
        one.looks()
        # Then the other is sent
        assert ledger.row().actor_name == "other"

    # And the first when the row is free; that was no trouble
    one.looks()
    assert [row.actor_name for row in ledger.rows()] == ["other", "report"]
    assert caplog.records == []


def test_a_worker_goes_on_ticking_when_postgresql_is_back(
    ledger_with: Callable[..., LedgerStage], caplog: pytest.LogCaptureFixture
) -> None:
    # Given a worker with a periodic actor
    ledger = ledger_with(session={"application_name": "ticking"})
    caplog.set_level(logging.INFO, "onetake")

    @ledger.actor(periodic=DAILY)
    def report() -> None:
        ledger.effect("reported")

    with ledger.worker(threads=1):
        eventually(lambda: ticks(ledger))

        # When PostgreSQL goes away while it looks, for more than one look
        ledger.servers.postgres.stop()
        ledger.hang_up()
        eventually(lambda: "PostgreSQL cannot be used" in caplog.text)
        passed = Event()
        assert not passed.wait(1.5)
        ledger.servers.postgres.start()
        eventually(lambda: "PostgreSQL can be used again" in caplog.text)
        set_back(ledger)

        # Then what is due is performed, and the outage was said once
        eventually(ledger.effects)
        ledger.expect_settled()
    assert caplog.text.count("cannot be used") == 1
    assert caplog.text.count("can be used again") == 1

    # And a worker that has stopped leaves no thread and no session
    assert [thread for thread in threading.enumerate() if thread.name == "onetake-ticks"] == []
    ledger.database.close()
    eventually(lambda: ledger.sql("SELECT 1 FROM pg_stat_activity WHERE application_name = 'ticking'") == [])


# Declared, and performed


@pytest.mark.parametrize("idempotency", ["transaction", "external", "off"])
def test_the_body_can_read_which_tick_it_is(idempotency: str, ledger: LedgerStage) -> None:
    # Given Dramatiq's CurrentMessage in the stack, and an actor of any kind
    ledger.broker.add_middleware(CurrentMessage())

    @ledger.actor(periodic=DAILY, timezone="Europe/Berlin", idempotency=idempotency)
    def report(title: str = "daily") -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        ledger.effect(f"{title} {message.options['tick']}")

    # When it is due
    with ledger.worker(threads=1):
        eventually(lambda: ticks(ledger))
        set_back(ledger)
        # Then its body knows of what
        eventually(ledger.effects)
        ledger.expect_settled()
    assert ledger.effects() == [f"daily {midnight(ledger).isoformat()}"]


def test_a_worker_without_periodic_actors_looks_for_none(ledger: LedgerStage) -> None:
    # Given an actor without the option
    @ledger.actor()
    def report() -> None: ...

    # When a worker runs; then it has no thread for ticks
    with ledger.worker():
        names = {thread.name for thread in threading.enumerate()}
    assert "onetake-relay" in names
    assert "onetake-ticks" not in names


def declare(options: dict[str, Any], body: Callable[..., Any] = lambda: None) -> None:
    """Declare an actor on a broker that connects to nothing."""
    broker = StubBroker()
    broker.add_middleware(IdempotentConsumer(inbox_on(Database(None))))
    actor: Any = dramatiq.actor(broker=broker, actor_name="report", **options)
    actor(body)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"periodic": "* * * *"}, r"'report': periodic is '\* \* \* \*'.* not five fields.*five fields"),
        ({"periodic": "* * * * * *"}, "not five fields"),
        ({"periodic": ""}, "not five fields"),
        ({"periodic": 5}, "periodic is 5, and it has not five fields"),
        ({"periodic": True}, "periodic is True"),
        ({"periodic": "60 * * * *"}, r"Bad minute; .* such as \"\*/5 \* \* \* \*\""),
        ({"periodic": "* * 30 2 *"}, "Bad day-of-month"),
        ({"periodic": "0 0 */31 * MON#2"}, "it never comes due"),
        ({"periodic": "9" * 5000 + " * * * *"}, "Exceeds the limit"),
        ({"periodic": "* * * * *", "timezone": "Europe/Atlantis"}, "timezone is 'Europe/Atlantis'.*Berlin"),
        ({"periodic": "* * * * *", "timezone": "Europe"}, "timezone is 'Europe'"),
        ({"periodic": "* * * * *", "timezone": "../UTC"}, r"timezone is '\.\./UTC'"),
        ({"periodic": "* * * * *", "timezone": 1}, "timezone is 1"),
        ({"timezone": "UTC"}, "'report' has a timezone and is not periodic: add periodic="),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_an_option_that_cannot_be_followed_is_refused(options: dict[str, Any], sentence: str) -> None:
    # Given a wrong value; when the actor is declared; then the error says what is right
    with pytest.raises(ConfigurationError, match=sentence):
        declare(options)


def test_a_periodic_actor_whose_function_needs_an_argument_is_refused() -> None:
    # Given a parameter without default; when the actor is declared; then the error names it
    with pytest.raises(ConfigurationError, match=r"no arguments.*'day'.*defaults"):
        declare({"periodic": DAILY}, lambda day: None)


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({"periodic": "*/5 * * * *"}, lambda: None),
        ({"periodic": "0  9-17/2 1,15 jan-mar mon"}, lambda day="today", *more, **rest: None),
        ({"periodic": "59 23 L * *", "timezone": "Europe/Berlin"}, lambda *, day="today": None),
        ({"periodic": None, "timezone": None}, lambda day: None),
    ],
    ids=["a step", "names and lists", "a last day and a zone", "not periodic"],
)
def test_what_can_be_followed_is_accepted(options: dict[str, Any], body: Callable[..., Any]) -> None:
    declare(options, body)


def test_a_periodic_actor_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an environment without it
    monkeypatch.setitem(sys.modules, "cronsim", None)

    # When a periodic actor is declared; then the error says what to install
    with pytest.raises(ConfigurationError, match=r"'report'.* pip install onetake\[periodic\]"):
        declare({"periodic": DAILY})

    # And no other actor needs it
    declare({})


@pytest.mark.parametrize("durable", [True, False])
def test_a_worker_with_a_periodic_actor_and_no_ledger_does_not_boot(durable: bool, stage: Stage) -> None:
    # Given a broker without ledger, ours or a stock one
    broker = stage.broker if durable else RedisBroker(url=stage.servers.redis.url)
    if not durable:
        broker.add_middleware(IdempotentConsumer(stage.inbox))

    @dramatiq.actor(broker=broker, periodic=DAILY)
    def report() -> None: ...

    # When its worker boots; then the error says what to add
    with pytest.raises(ConfigurationError, match=r"'report' is periodic.*with ledger=\(\.\.\.\)"):
        dramatiq.Worker(broker).start()
    broker.close()
    broker.client.close()


def test_two_periodic_actors_of_one_consumer_name_do_not_boot(ledger: LedgerStage) -> None:
    # Given two actors that would share their ticks
    for name in ("report", "digest"):
        ledger.actor(actor_name=name, consumer_name="mail", periodic=DAILY)(lambda: None)

    # When the worker boots; then the error names both
    with pytest.raises(ConfigurationError, match=r"'report' and 'digest' are both periodic.*'mail'"):
        dramatiq.Worker(ledger.broker).start()
