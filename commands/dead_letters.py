"""`manage.py dead-letters`: look at the messages that failed for good, requeue or discard them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Column, Table

from middleware import dead_letters as letters
from middleware.errors import NotRequeued

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from middleware.ledger import Ledger
    from middleware.tables import DeadLetter

#: What a table has room for; `show` and --json have everything.
COLUMNS = ("id", "message_id", "consumer_name", "reason", "error_class", "attempts", "died_at")

as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
some_ids = click.argument("ids", nargs=-1, required=True, metavar="ID...")


@click.group("dead-letters")
def dead_letters() -> None:
    """Messages that failed for good. ID: the id of the message, or of the row."""


@dead_letters.command("list")
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(min=1), help="The newest so many."
)
@click.option("--redis", "in_redis", is_flag=True, help="Those in Dramatiq's own queues in Redis.")
@as_json
def list_(limit: int, *, in_redis: bool, as_json: bool) -> None:
    """List the newest dead letters; exit 1 if there are any."""
    from actors import broker

    if in_redis:
        rows = [{**row, "message": _text(row["message"])} for row in letters.in_redis(broker)]
        columns: Iterable[str] = ("id", "queue_name", "died_ms", "message")
    else:
        rows = [_row(letter) for letter in letters.newest(_ledger(), limit)]
        columns = COLUMNS
    _print(rows, columns, as_json=as_json)
    if rows:
        raise SystemExit(1)


@dead_letters.command()
@some_ids
@as_json
def show(ids: tuple[str, ...], *, as_json: bool) -> None:
    """Show all that is known of dead letters."""
    found, missing = _find(ids)
    for letter in found:
        if as_json:
            click.echo(json.dumps(_row(letter), default=str))
        else:
            click.echo("\n".join(f"{name}: {value}" for name, value in _row(letter).items()) + "\n")
    if missing:
        raise SystemExit(1)


@dead_letters.command()
@some_ids
@click.option("--force", is_flag=True, help="Also one whose effect may stand without a key.")
@as_json
def requeue(ids: tuple[str, ...], *, force: bool, as_json: bool) -> None:
    """Send dead letters once more, under their own keys: what was done meanwhile is not doubled."""

    def act(ledger: Ledger, letter: DeadLetter) -> None:
        letters.requeue(ledger, letter, force=force)

    _each(ids, act, "requeued", as_json=as_json)
    from actors import broker

    broker.wake()


@dead_letters.command()
@some_ids
@as_json
def discard(ids: tuple[str, ...], *, as_json: bool) -> None:
    """Delete dead letters for good."""
    _each(ids, letters.discard, "discarded", as_json=as_json)


def _each(
    ids: tuple[str, ...], act: Callable[[Ledger, DeadLetter], object], done: str, *, as_json: bool
) -> None:
    """Do something with each; what cannot be done is said, and the others are done all the same."""
    found, refused = _find(ids)
    for letter in found:
        try:
            outcome = done if act(_ledger(), letter) is not False else "is gone already"
        except NotRequeued as error:
            refused, outcome = True, str(error)
        said = {"id": letter.id, "message_id": letter.message_id, "outcome": outcome}
        click.echo(json.dumps(said) if as_json else f"{letter.id} {letter.message_id}: {outcome}")
    if refused:
        raise SystemExit(1)


def _find(ids: tuple[str, ...]) -> tuple[list[DeadLetter], bool]:
    """The dead letters with these ids, each once, and whether some id has none."""
    found: dict[int, DeadLetter] = {}
    missing = False
    for ident in ids:
        matching = letters.find(_ledger(), ident)
        found |= {letter.id: letter for letter in matching}
        if not matching:
            missing = True
            click.echo(f"There is no dead letter {ident}.", err=True)
    return list(found.values()), missing


def _ledger() -> Ledger:
    from actors import broker

    assert broker.ledger is not None
    return broker.ledger


def _row(letter: DeadLetter) -> dict[str, Any]:
    return {**letter.__data__, "message": _text(bytes(letter.message))}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _print(rows: list[dict[str, Any]], columns: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            click.echo(json.dumps(row, default=str))
        return
    if rows and not sys.stdout.isatty():  # a pipe gets whole lines, which no terminal has to hold
        for row in rows:
            click.echo("\t".join(str(row[name]) for name in columns))
        return
    table = Table(*(Column(name, overflow="fold") for name in columns))
    for row in rows:
        table.add_row(*(str(row[name]) for name in columns))
    Console().print(table if rows else "There are no dead letters.", markup=False)
