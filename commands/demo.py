"""`manage.py demo`: orders delivered three times each, everything killed once, and the effects counted."""

from __future__ import annotations

import tempfile
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
from peewee import fn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import settings
from embedded import temporary_folder

from . import configuration
from .demo_processes import DemoProcesses, counted
from .demo_troubles import Troubles
from .interruption import Interruption
from .own_place import own_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dramatiq import Message

ORDERS = 300
COPIES = 3
SENT = ORDERS * COPIES
#: Each order is reserved, and then confirmed by a message that the reservation sends.
EFFECTS = 2 * ORDERS
DELIVERIES = SENT + ORDERS
DUPLICATES = SENT - ORDERS

#: Every second order's copies come at the same moment, those of the others this many apart.
APART = 60

TIME_LIMIT_S = 50


@dataclass(frozen=True)
class Outcome:
    """What was found when nothing moved any more; stock is in pieces."""

    orders: int
    deliveries: int
    duplicates: int
    effects: int
    stock_expected: int
    stock_found: int
    owed: int
    dead_letters: int
    troubles: Troubles

    @property
    def is_exact(self) -> bool:
        """Whether each message took effect once, every other delivery was answered, and nothing is owed."""
        return (
            self.orders == ORDERS
            and self.effects == EFFECTS
            and self.stock_found == self.stock_expected
            and self.deliveries >= DELIVERIES
            and self.duplicates >= DUPLICATES
            and self.owed == self.dead_letters == 0
            and min(self.troubles.in_hand, self.troubles.lost_and_owed) > 0
        )

    def table(self) -> Table:
        """The same for a reader."""
        table = Table("", "expected", "found")
        for column in table.columns[1:]:
            column.justify = "right"
        for what, expected, found in (
            ("orders confirmed", f"{ORDERS}", self.orders),
            ("deliveries", f"at least {DELIVERIES}", self.deliveries),
            ("in the killed worker's hands", "at least 1", self.troubles.in_hand),
            ("lost with Redis: came back out of PostgreSQL", "at least 1", self.troubles.lost_and_owed),
            ("lost with Redis: sent again by their sender", "any", self.troubles.lost_and_sent_again),
            ("duplicates answered", f"at least {DUPLICATES}", self.duplicates),
            ("effects", f"{EFFECTS}", self.effects),
            ("stock", f"{self.stock_expected}", self.stock_found),
            ("messages still owed", "0", self.owed),
            ("dead letters", "0", self.dead_letters),
        ):
            table.add_row(what, expected, f"{found}")
        return table


def demo() -> None:
    """Run the demonstration, print what came of it, and leave nothing behind.

    Raises:
      InterruptedBySignal: a signal came.
      ClickException: not every message took effect once.
    """
    console = Console()
    settings.HEARTBEAT_TIMEOUT_MS = 5_000  # the killed worker has to be missed within the minute
    with (
        Interruption() as interruption,
        _progress(console) as progress,
        configuration.servers(temporary_folder()),
        own_place(),
        tempfile.TemporaryDirectory(prefix="onetake-demo-") as logs,
        closing(DemoProcesses(Path(logs), interruption)) as processes,
        closing(Troubles(processes, interruption)) as troubles,
    ):
        from models import database, load_sample_data, migrate

        with closing(database):
            migrate()
            load_sample_data()
            stock_before = _stock()
            for kind in ("threads", "gevent", "relay"):
                processes.start(kind)
            _deliver(processes, troubles, interruption, progress)
            outcome = _outcome(stock_before, troubles)
        words = "" if outcome.is_exact else processes.last_words()
    console.print(words, outcome.table(), sep="\n", markup=False, highlight=False)
    if not outcome.is_exact:
        raise click.ClickException("Not every message took effect once; the table shows what did.")
    console.print("Every message took effect once.")


def _progress(console: Console) -> Progress:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    progress.add_task("starting servers, workers and a relay", total=EFFECTS)
    return progress


def _deliver(
    processes: DemoProcesses, troubles: Troubles, interruption: Interruption, progress: Progress
) -> None:
    """Send everything, with troubles meanwhile, and wait until nothing moves."""
    from models import ProcessedMessage

    (task,) = progress.task_ids

    def show(description: str) -> None:
        progress.update(task, completed=ProcessedMessage.select().count(), description=description)

    deadline = monotonic() + TIME_LIMIT_S
    for sent, _message in enumerate(_send(), 1):
        interruption.check()
        troubles.after(sent)
        show("delivering")
    troubles.end()
    while _unfinished() and monotonic() < deadline:
        show("recovering what was lost")
        processes.check()
        interruption.pause(0.1)
    show("done")


def _send() -> Iterator[Message[Any]]:
    """Place the orders and send each message `COPIES` times; yields each that was sent.

    The first is sent as an application sends it: in the transaction of its order, hence through
    the ledger. The copies go to Redis directly, together with it or later. They stand for what
    delivers a message twice elsewhere, and may overtake the first.
    """
    from actors import broker, reserve_stock
    from models import Order, database

    later: deque[Message[Any]] = deque()
    for number in range(ORDERS):
        with database.atomic():
            order = Order.create(
                sku=f"SKU-{number % 10 + 1}",
                quantity=number % 3 + 1,
                customer=f"customer-{number}@example.org",
            )
            message = reserve_stock.send(order.id)
        yield message
        copies = repeat(message, COPIES - 1)
        if number % 2:
            yield from map(broker.enqueue, copies)
        else:
            later.extend(copies)
        while len(later) > APART:
            yield broker.enqueue(later.popleft())
    yield from map(broker.enqueue, later)


def _unfinished() -> bool:
    """Whether a message is in Redis or owed; Redis is asked first, for its messages make new rows."""
    from actors import broker, reserve_stock
    from models import OutboxMessage

    return broker.do_qsize(reserve_stock.queue_name) > 0 or OutboxMessage.select().exists()


def _stock() -> int:
    from models import Stock

    return int(Stock.select(fn.SUM(Stock.quantity)).scalar())


def _outcome(stock_before: int, troubles: Troubles) -> Outcome:
    from models import DeadLetter, Order, OrderState, OutboxMessage, ProcessedMessage

    ordered = int(Order.select(fn.SUM(Order.quantity)).scalar())
    counts = counted()
    return Outcome(
        orders=Order.select().where(Order.state == OrderState.CONFIRMED).count(),
        deliveries=sum(count for name, count in counts.items() if name.startswith("started:")),
        duplicates=counts.get("duplicates", 0),
        effects=ProcessedMessage.select().count(),
        stock_expected=stock_before - ordered,
        stock_found=_stock(),
        owed=OutboxMessage.select().count(),
        dead_letters=DeadLetter.select().count(),
        troubles=troubles,
    )
