"""Onetake beside the same work written by hand, and the ledger: `python -m benchmarks.quick`."""

from __future__ import annotations

import signal
import statistics
import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from embedded import PostgreSQL, Valkey, temporary_folder

from .drain import Bench, Contender, InexactError, Run
from .ledger import PASSING, Figures, LedgerBench

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HAND = Contender(
    "by hand",
    "benchmarks.hand",
    "by_hand",
    "processed_keys",
    "consumer_name text NOT NULL, message_id text NOT NULL,"
    " processed_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (consumer_name, message_id)",
)
PEEWEE = Contender("Onetake, peewee", "benchmarks.onetake", "with_peewee", "processed_messages")
SQL = Contender("Onetake, SQL", "benchmarks.onetake", "with_sql", "processed_messages")

#: Where others had more than this share of the machine, rates say little about the contenders.
QUIET = 0.1

#: How many times as many messages per second as by hand.
GOALS = {PEEWEE: 1.4, SQL: 1.7}
#: From commit to Redis, in milliseconds, and the share of a core that an idle relay may take.
COMMIT_GOAL_MS, IDLE_GOAL = 10, 0.01


@click.command()
@click.option("--rounds", default=2, show_default=True, help="Each runs every contender once.")
@click.option("--messages", default=6_000, show_default=True, help="Messages of one run.")
@click.option("--ledger/--no-ledger", default=True, show_default=True, help="Measure the ledger too.")
def main(rounds: int, messages: int, *, ledger: bool) -> None:
    """Measure one stock decrement per message, on servers that are started for it.

    Two rounds, and the ledger's part once, so that it takes less than three minutes: enough to see a
    slip. Six rounds tell more. Exit 1 if a run was not exact.
    """
    # So that a SIGTERM ends as Ctrl-C does: what was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    try:
        with _bench() as bench, Progress(console=console, transient=True) as progress:
            runs = _run_rounds(bench, progress, rounds, messages)
            progress.add_task("the ledger", total=None)
            figures = LedgerBench(bench, SQL).figures() if ledger else None
    except InexactError as error:
        console.print(f"[red]Not exact:[/red] {error}")
        sys.exit(1)
    console.print(_rates(runs, messages))
    console.print(_cpu(runs))
    if figures is not None:
        console.print(_ledger(figures, quiet=_elsewhere(runs) <= QUIET))
    if _elsewhere(runs) > QUIET:
        console.print(
            f"[yellow]In one of the runs {_elsewhere(runs):.0%} of the machine's CPU went to "
            "something else, so there is no verdict on the goals.[/] Run it on a quiet machine."
        )


def _run_rounds(bench: Bench, progress: Progress, rounds: int, messages: int) -> dict[Contender, list[Run]]:
    runs: dict[Contender, list[Run]] = {HAND: [], PEEWEE: [], SQL: []}
    contenders = list(runs)
    task = progress.add_task("", total=rounds * len(runs))
    for number in range(rounds):
        # There and back, and turned further each time: none profits from its place in the round.
        first = number // 2 % len(runs)
        order = contenders[first:] + contenders[:first]
        for contender in reversed(order) if number % 2 else order:
            progress.update(task, description=contender.name)
            runs[contender].append(bench.drain(contender, messages))
            progress.advance(task)
    return runs


@contextmanager
def _bench() -> Iterator[Bench]:
    """A bench on durable servers of its own; nothing of them is left afterwards."""
    with (
        temporary_folder() as folder,
        PostgreSQL(folder) as postgresql,
        Valkey(folder) as valkey,
        closing(Bench(postgresql.url, valkey.url, folder.path)) as bench,
    ):
        bench.migrate()
        yield bench


def _rates(runs: dict[Contender, list[Run]], messages: int) -> Table:
    table = Table(
        title="One decrement per message, 2 processes of 4 threads",
        caption=f"Medians of {len(runs[HAND])} rounds of {messages:,} messages, timed from a quarter"
        " to 95 % of them.\n`times`: as many messages as by hand, in the same round. Every run was"
        " exact by SQL.",
    )
    quiet = _elsewhere(runs) <= QUIET
    table.add_column("")
    for heading in ("messages/s", "range", "times", "range", "goal"):
        table.add_column(heading, justify="right")
    for contender, measured in runs.items():
        rates = [run.rate for run in measured]
        ratios = [run.rate / hand.rate for run, hand in zip(measured, runs[HAND], strict=True)]
        cells = [*_spread(rates, ",.0f"), *_spread(ratios, ".2f")]
        goal = GOALS.get(contender)
        if goal is not None:
            cells.append(f"{goal} {_verdict(statistics.median(ratios) >= goal, quiet=quiet)}")
        table.add_row(contender.name, *cells)
    return table


def _elsewhere(runs: dict[Contender, list[Run]]) -> float:
    return max(run.elsewhere for measured in runs.values() for run in measured)


def _verdict(reached: bool, *, quiet: bool) -> str:  # noqa: FBT001
    if not quiet:
        return "[yellow]open[/]"
    return "[green]reached[/]" if reached else "[red]missed[/]"


def _cpu(runs: dict[Contender, list[Run]]) -> Table:
    table = Table(title="CPU per message in microseconds, medians over the same window")
    table.add_column("")
    for heading in ("workers", "PostgreSQL", "Valkey", "together"):
        table.add_column(heading, justify="right")
    for contender, measured in runs.items():
        parts = [
            [run.workers_us for run in measured],
            [run.postgresql_us for run in measured],
            [run.valkey_us for run in measured],
            [run.cpu_us for run in measured],
        ]
        table.add_row(contender.name, *(f"{statistics.median(part):,.0f}" for part in parts))
    return table


def _ledger(figures: Figures, *, quiet: bool) -> Table:
    table = Table(
        title="The ledger: from a row of PostgreSQL to Redis",
        caption=f"Measured once; times are medians. {PASSING:,} messages pass through relay, Redis and"
        " workers, exactly once by SQL: alone, and beside a transaction that was open before them,"
        " so that PostgreSQL keeps all their dead rows (T36).",
    )
    table.add_column("")
    for heading in ("alone", "beside a transaction", "goal"):
        table.add_column(heading, justify="right")
    commit = f"{COMMIT_GOAL_MS} {_verdict(figures.commit_ms <= COMMIT_GOAL_MS, quiet=quiet)}"
    idle = f"{IDLE_GOAL:.0%} {_verdict(figures.idle <= IDLE_GOAL, quiet=quiet)}"
    alone, beside = figures.alone, figures.beside_snapshot
    for row in (
        ("rows/s of one relay", f"{figures.rows_per_s:,.0f}", "", ""),
        ("an idle relay, of a core", f"{figures.idle:.1%}", "", idle),
        ("commit to Redis, ms", f"{figures.commit_ms:.1f}", "", commit),
        ("messages/s passing", f"{alone.rate:,.0f}", f"{beside.rate:,.0f}", ""),
        ("messages/s, last fifth", f"{alone.last_rate:,.0f}", f"{beside.last_rate:,.0f}", ""),
        ("commit to Redis then, ms", f"{alone.commit_ms:.1f}", f"{beside.commit_ms:.1f}", ""),
    ):
        table.add_row(*row)
    return table


def _spread(values: Sequence[float], form: str) -> tuple[str, str]:
    return f"{statistics.median(values):{form}}", f"{min(values):{form}}-{max(values):{form}}"


if __name__ == "__main__":
    main()
