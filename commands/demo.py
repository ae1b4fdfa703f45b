"""`manage.py demo`: orders delivered three times each, everything killed once, and the effects counted."""

from __future__ import annotations

import tempfile
from collections import deque
from contextlib import closing
from itertools import repeat
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import settings
from embedded import temporary_folder

from . import configuration
from .demo_outcome import COPIES, EFFECTS, ORDERS, Outcome, customer, stock
from .demo_processes import KINDS, DemoProcesses
from .demo_troubles import Troubles
from .interruption import Interruption
from .own_place import own_payments, own_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dramatiq import Message

#: Every second order's copies come at the same moment, those of the others this many apart.
APART = 60

TIME_LIMIT_S = 50


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
        own_payments(Path(logs)),
        closing(DemoProcesses(Path(logs), interruption)) as processes,
        closing(Troubles(processes, interruption)) as troubles,
    ):
        from models import database, load_sample_data, migrate

        with closing(database):
            migrate()
            load_sample_data()
            stock_before = stock()
            for kind in KINDS:
                processes.start(kind)
            _deliver(processes, troubles, interruption, progress)
            outcome = Outcome(stock_before, troubles)
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
    progress.add_task("starting servers, workers, a relay and the payment service", total=EFFECTS)
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
    from actors import broker, fulfil
    from models import Order, database

    later: deque[Message[Any]] = deque()
    for number in range(ORDERS):
        with database.atomic():
            order = Order.create(
                sku=f"SKU-{number % 10 + 1}",
                quantity=number % 3 + 1,
                customer=customer(number),
            )
            message = fulfil(order.id)
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
