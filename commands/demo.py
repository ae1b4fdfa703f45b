"""`manage.py demo`: orders delivered three times each, a worker killed, and the effects counted."""

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
from .demo_workers import DemoWorkers
from .interruption import Interruption
from .own_place import own_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dramatiq import Message

ORDERS = 300
COPIES = 3
DELIVERIES = ORDERS * COPIES
DUPLICATES = DELIVERIES - ORDERS

#: Every second order's copies come at the same moment, those of the others this many apart.
APART = 60
#: One worker is killed after this many deliveries were sent, and is away for that many.
KILL_AFTER, AWAY = DELIVERIES // 3, DELIVERIES // 6

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
    in_hand_when_killed: int

    @property
    def is_exact(self) -> bool:
        """Whether each message took effect once and every other delivery of it was answered."""
        return (
            self.orders == self.effects == ORDERS
            and self.in_hand_when_killed > 0
            and self.duplicates >= DUPLICATES
            and self.stock_found == self.stock_expected
        )

    def table(self) -> Table:
        """The same for a reader."""
        table = Table("", "expected", "found")
        for column in table.columns[1:]:
            column.justify = "right"
        for what, expected, found in (
            ("orders reserved", f"{ORDERS}", self.orders),
            ("deliveries", f"at least {DELIVERIES}", self.deliveries),
            ("in the killed worker's hands", "at least 1", self.in_hand_when_killed),
            ("duplicates answered", f"at least {DUPLICATES}", self.duplicates),
            ("effects", f"{ORDERS}", self.effects),
            ("stock", f"{self.stock_expected}", self.stock_found),
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
        closing(DemoWorkers(Path(logs), interruption)) as workers,
    ):
        from models import database, load_sample_data, migrate

        with closing(database):
            migrate()
            load_sample_data()
            outcome = _deliver(workers, interruption, progress)
        words = "" if outcome.is_exact else workers.last_words()
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
    progress.add_task("starting servers and workers", total=DELIVERIES)
    return progress


def _deliver(workers: DemoWorkers, interruption: Interruption, progress: Progress) -> Outcome:
    """Send everything, kill a worker meanwhile, wait until nothing moves, and count."""
    from actors import broker

    stock_before = _stock()
    workers.start("threads")
    workers.start("gevent")
    deadline = monotonic() + TIME_LIMIT_S
    (task,) = progress.task_ids
    in_hand = back_after = 0
    for sent, message in enumerate(_messages(), 1):
        interruption.check()
        broker.enqueue(message)
        progress.update(task, completed=sent - workers.unfinished(), description="delivering")
        if sent >= KILL_AFTER and not in_hand:
            in_hand = workers.kill_in_mid_work("threads")
            back_after = sent + AWAY
        if sent == back_after:
            workers.start("threads")
    if not workers.is_running("threads"):  # it was killed late
        workers.start("threads")
    while (unfinished := workers.unfinished()) and monotonic() < deadline:
        progress.update(
            task,
            completed=DELIVERIES - unfinished,
            description="recovering the killed worker's messages",
        )
        workers.check()
        interruption.pause(0.1)
    progress.update(task, completed=DELIVERIES - unfinished, description="done")
    return _outcome(workers, stock_before, in_hand)


def _messages() -> Iterator[Message[Any]]:
    """Place the orders; each message comes `COPIES` times, together or apart."""
    from actors import reserve_stock
    from models import Order

    later: deque[Message[Any]] = deque()
    for number in range(ORDERS):
        order = Order.create(
            sku=f"SKU-{number % 10 + 1}",
            quantity=number % 3 + 1,
            customer=f"customer-{number}@example.org",
        )
        message = reserve_stock.message(order.id)
        yield message
        if number % 2:
            yield from repeat(message, COPIES - 1)
        else:
            later.extend(repeat(message, COPIES - 1))
        while len(later) > APART:
            yield later.popleft()
    yield from later


def _stock() -> int:
    from models import Stock

    return int(Stock.select(fn.SUM(Stock.quantity)).scalar())


def _outcome(workers: DemoWorkers, stock_before: int, in_hand: int) -> Outcome:
    from models import Order, OrderState, ProcessedMessage

    ordered = int(Order.select(fn.SUM(Order.quantity)).scalar())
    return Outcome(
        orders=Order.select().where(Order.state == OrderState.RESERVED).count(),
        deliveries=workers.deliveries(),
        duplicates=workers.duplicates(),
        effects=ProcessedMessage.select().count(),
        stock_expected=stock_before - ordered,
        stock_found=_stock(),
        in_hand_when_killed=in_hand,
    )
