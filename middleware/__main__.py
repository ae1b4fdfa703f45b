"""`python -m onetake relay | migrate | message | dead-letters --broker MODULE`, for any application."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import signal
import sys
from io import TextIOWrapper
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import dramatiq
import peewee
import redis

from . import dead_letters, schema
from .broker import DurableRedisBroker
from .errors import NotRequeued, OnetakeError
from .relay import Relay
from .workflow import lines_of

if TYPE_CHECKING:
    from .ledger import Ledger
    from .tables import DeadLetter


#: How long the round may take that a relay is in when it is told to stop.
LAST_ROUND_S = 8.0
#: What can be done with dead letters.
ACTIONS = "list", "show", "requeue", "discard"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns 0 for well, 1 for a finding or nothing found, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m onetake", description=__doc__)
    parser.add_argument("command", choices=["relay", "migrate", "message", "dead-letters"])
    parser.add_argument(
        "action",
        nargs="?",
        help=f"of dead-letters: {', '.join(ACTIONS)}; of message: the message's id",
    )
    parser.add_argument("ids", nargs="*", help="of dead letters: the message's id, or the row's own")
    parser.add_argument(
        "--broker",
        required=True,
        metavar="MODULE",
        help="a module that makes the broker",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object for each dead letter, or for the message"
    )
    parser.add_argument("--redis", action="store_true", help="list what lies in Dramatiq's own queues")
    parser.add_argument("--force", action="store_true", help="requeue also what may have had its effect")
    chosen = parser.parse_args(arguments)
    _check(parser, chosen)
    sys.path.insert(0, "")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever a message holds is shown
    try:
        broker = broker_of(chosen.broker)
        if chosen.command == "migrate":
            print(*schema.migrate(broker), sep="\n")
            return 0
        if broker.ledger is None:
            print(
                f"The broker of {chosen.broker} has no ledger: hand it ledger=(...).",
                file=sys.stderr,
            )
            return 2
        if chosen.command == "relay":
            relay(broker, broker.ledger)
            return 0
        if chosen.command == "message":
            return _message(broker, chosen)
        if chosen.redis and chosen.command == "dead-letters":
            return _list_redis(broker)
        return _dead_letters(broker.ledger, chosen)
    except (OnetakeError, peewee.PeeweeException, redis.RedisError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1


def _check(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    if chosen.command == "message":
        if chosen.action is None or chosen.ids:
            parser.error("message takes one id")
    elif chosen.command != "dead-letters":
        if chosen.action is not None:
            parser.error(f"{chosen.command} takes nothing but --broker: what is {chosen.action!r}?")
    elif chosen.action not in (None, *ACTIONS):
        parser.error(f"dead-letters {chosen.action}: there are {', '.join(ACTIONS)}")
    elif bool(chosen.ids) == (chosen.action in (None, "list")):
        parser.error("list takes no ids, and show, requeue and discard take at least one")


def broker_of(module: str) -> DurableRedisBroker:
    """The broker that importing a module makes the global one.

    Raises:
      OnetakeError: there is no such module, or its broker is none of ours.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise OnetakeError(f"--broker {module}: {error}. Name a module that makes the broker.") from error
    broker = dramatiq.get_broker()
    if not isinstance(broker, DurableRedisBroker):
        raise OnetakeError(
            f"--broker {module}: its broker is a {type(broker).__name__}, no DurableRedisBroker."
        )
    return broker


def relay(broker: DurableRedisBroker, ledger: Ledger) -> None:
    """Run a relay in this process until SIGTERM or SIGINT; what it has begun it finishes."""
    broker.check_url()
    broker.guard.database.check_url()
    logging.basicConfig(level=logging.INFO)
    stopping = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    # On a thread: in libpq this one would hear of no signal while PostgreSQL is frozen.
    thread = Thread(target=Relay(broker, ledger).run, args=(stopping,), daemon=True)
    thread.start()
    while thread.is_alive() and not stopping.wait(1.0):
        pass
    if not stopping.is_set():
        raise SystemExit(1)  # it died, and its traceback has been printed
    thread.join(timeout=LAST_ROUND_S)


def _message(broker: DurableRedisBroker, chosen: argparse.Namespace) -> int:
    step = broker.workflow_of(chosen.action)
    if step is None:
        print(f"Nothing is known of message {chosen.action}.", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(dataclasses.asdict(step), default=str))
    else:
        print(*lines_of(step, chosen.action), sep="\n")
    return 0


def _dead_letters(ledger: Ledger, chosen: argparse.Namespace) -> int:
    finding = False
    if chosen.action in (None, "list"):
        letters = dead_letters.newest(ledger, None)
        finding = bool(letters)
    else:
        by_id = {ident: dead_letters.find(ledger, ident) for ident in chosen.ids}
        letters = list({letter.id: letter for found in by_id.values() for letter in found}.values())
        for ident in (ident for ident, found in by_id.items() if not found):
            print(f"There is no dead letter {ident}.", file=sys.stderr)
            finding = True
    for letter in letters:
        try:
            if chosen.action == "requeue":
                dead_letters.requeue(ledger, letter, force=chosen.force)
            elif chosen.action == "discard":
                dead_letters.discard(ledger, letter)
        except NotRequeued as error:  # the others are requeued all the same
            print(error, file=sys.stderr)
            finding = True
        else:
            _print(letter, chosen)
    return int(finding)


def _list_redis(broker: DurableRedisBroker) -> int:
    rows = list(dead_letters.in_redis(broker))
    for row in rows:
        print(json.dumps({**row, "message": row["message"].decode("utf-8", "backslashreplace")}))
    return int(bool(rows))


def _print(letter: DeadLetter, chosen: argparse.Namespace) -> None:
    row: dict[str, Any] = dict(letter.__data__)
    row["message"] = bytes(letter.message).decode("utf-8", "backslashreplace")
    if chosen.json:
        print(json.dumps(row, default=str))
    elif chosen.action == "show":
        for name, value in row.items():
            print(f"{name}: {value}")
    else:
        print(
            row["id"],
            row["message_id"],
            row["actor_name"],
            row["reason"],
            row["error_class"],
            sep="\t",
        )


if __name__ == "__main__":
    sys.exit(main())
