"""`manage.py message`: what became of a message, and of the workflow that it belongs to."""

from __future__ import annotations

import dataclasses
import json

import click

from middleware.workflow import lines_of


@click.command()
@click.argument("message_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def message(message_id: str, *, as_json: bool) -> None:
    """What set a message off, what it set off, and the state of each; exit 1 if nothing is known.

    Each line: the consumer, its state, since when (or until when it waits), and the message's id. The
    message that was asked for is marked.
    """
    from actors import broker

    step = broker.workflow_of(message_id)
    if step is None:
        click.echo(f"Nothing is known of message {message_id}.", err=True)
        raise SystemExit(1)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(step), default=str))
    else:
        click.echo("\n".join(lines_of(step, message_id)))
