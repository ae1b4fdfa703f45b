"""`python -m onetake relay | migrate | message | dead-letters`: the command line of other applications."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Any

import pytest

from .processes import eventually
from .servers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from signal import Signals

    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.ledger_stage",)

#: A foreign project; the wheel calls our folder `middleware` onetake.
SHOP = """
import os
import dramatiq
from middleware import Database, DurableRedisBroker, IdempotentConsumer, tables

database = Database(os.environ.get("DATABASE_URL"))

models = tables.on(database)
ledger = models if os.environ.get("LEDGER", "yes") == "yes" else None
broker = DurableRedisBroker(url=os.environ.get("REDIS_URL"), namespace="stage", ledger=ledger)
if os.environ.get("GUARD", "yes") == "yes":
    broker.add_middleware(IdempotentConsumer(models.ProcessedMessage))
dramatiq.set_broker(broker)
"""


class Shop:
    """A foreign project on the tables of a stage, and its command line."""

    def __init__(self, folder: Path, stage: LedgerStage) -> None:
        self.folder, self.stage = folder, stage
        (folder / "shop.py").write_text(SHOP)
        (folder / "stock.py").write_text("import dramatiq\nfrom dramatiq.brokers.stub import StubBroker\n")
        with (folder / "stock.py").open("a") as module:
            module.write("dramatiq.set_broker(StubBroker())\n")
        (folder / "wrong.py").write_text("import nowhere_to_be_found\n")

    def start(self, *arguments: str, broker: str = "shop", **env: str) -> subprocess.Popen[str]:
        servers = {
            "PYTHONPATH": str(PROJECT),
            "DATABASE_URL": self.stage.url(),
            "REDIS_URL": self.stage.servers.redis.url,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "middleware", *arguments, *(["--broker", broker] if broker else [])],
            cwd=self.folder,
            env={**os.environ, **servers, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **options: str) -> tuple[int, str, str]:
        """Run a command to its end: its exit code and what it printed; never a traceback."""
        with self.start(*arguments, **options) as process:
            try:
                output, errors = process.communicate(timeout=15)
            finally:
                process.kill()
        assert "Traceback" not in errors, errors
        return process.returncode, output, errors


@pytest.fixture
def shop(tmp_path: Path, ledger: LedgerStage) -> Shop:
    return Shop(tmp_path, ledger)


def dead(ledger: LedgerStage, count: int, **options: Any) -> list[str]:
    """So many messages that failed for good; their ids."""

    @ledger.actor(actor_name="fails", max_retries=0, **options)
    def fails(number: int) -> None:
        raise ValueError(number)

    with ledger.worker_and_relay():
        ids = [ledger.send(fails.message(number)).message_id for number in range(count)]
        eventually(lambda: len(ledger.letters()) == count)
        ledger.expect_settled()
    return ids


def test_migrate_makes_the_tables_and_does_so_again_without_harm(shop: Shop) -> None:
    # Given an empty schema
    for table in ("processed_messages", "outbox_messages", "dead_letters"):
        shop.stage.sql(f"DROP TABLE {table}")

    # When it is migrated twice, by two at once and then again
    processes = [shop.start("migrate") for _ in range(2)]
    outputs = [process.communicate(timeout=30) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    code, output, _ = shop.run("migrate")

    # Then the tables are there
    assert code == 0
    assert output.split() == [
        "processed_messages",
        "outbox_messages",
        "dead_letters",
        "barriers",
        "barrier_members",
        "ticks",
    ]
    assert (shop.stage.rows(), shop.stage.letters(), shop.stage.key_rows()) == ([], [], [])


@pytest.fixture
def relay(shop: Shop) -> Iterator[subprocess.Popen[str]]:
    process = shop.start("relay")
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_relay_publishes_until_it_is_asked_to_end(
    shop: Shop, relay: subprocess.Popen[str], number: Signals
) -> None:
    # Given a relay
    @shop.stage.actor()
    def write(label: str) -> None:
        raise NotImplementedError

    # When a message is sent, then it is published
    sent = shop.stage.send(write.message("a"))
    eventually(lambda: shop.stage.in_redis() == [sent.message_id], 20)

    # And when it is asked to, it ends well
    relay.send_signal(number)
    _, errors = relay.communicate(timeout=15)
    assert relay.returncode == 0
    assert "Traceback" not in errors


def test_dead_letters_are_listed_the_newest_first_and_are_a_finding(shop: Shop, ledger: LedgerStage) -> None:
    # Given none, then the list is empty and well
    assert shop.run("dead-letters") == shop.run("dead-letters", "list") == (0, "", "")

    # When there are two
    dead(ledger, 2)

    # Then they are listed, and the exit code says so
    code, output, _ = shop.run("dead-letters", "list", "--json")
    assert code == 1
    assert [json.loads(line)["id"] for line in output.splitlines()] == [2, 1]
    code, output, _ = shop.run("dead-letters")
    assert code == 1
    assert [line.split("\t")[0] for line in output.splitlines()] == ["2", "1"]


def test_a_dead_letter_is_shown_requeued_and_discarded(shop: Shop, ledger: LedgerStage) -> None:
    # Given three
    first, second, third = dead(ledger, 3)

    # When one is shown by the id of its message, and one by that of its row
    code, output, _ = shop.run("dead-letters", "show", first)
    assert (code, "error_class: ValueError" in output) == (0, True)
    ((row_id,),) = ledger.sql("SELECT id::text FROM dead_letters WHERE message_id = %s", second)
    code, output, _ = shop.run("dead-letters", "show", row_id, "--json")
    assert (code, json.loads(output)["message_id"]) == (0, second)

    # When one is requeued, then it is owed under its key, above its last attempt
    assert shop.run("dead-letters", "requeue", first)[0] == 0
    assert [(row.message_id, row.attempt) for row in ledger.rows()] == [(first, 1)]

    # When one is discarded, then it is gone
    assert shop.run("dead-letters", "discard", second)[0] == 0
    assert [letter.message_id for letter in ledger.letters()] == [third]


def test_what_cannot_be_requeued_stops_no_other_and_is_told(shop: Shop, ledger: LedgerStage) -> None:
    # Given one that escaped its transaction, one that nobody can read, and another
    escaped, unreadable, other = dead(ledger, 3)
    ledger.sql("UPDATE dead_letters SET error_class = 'TransactionEscaped' WHERE message_id = %s", escaped)
    ledger.sql("UPDATE dead_letters SET message = 'x' WHERE message_id = %s", unreadable)

    # When all are requeued, with one that does not exist
    code, _, errors = shop.run("dead-letters", "requeue", escaped, "77", unreadable, other)

    # Then the last is owed, and the reader hears of the others
    assert code == 1
    assert "without a key" in errors
    assert "77" in errors
    assert "cannot be" in errors
    assert ledger.owed() == [other]

    # And with force the first is owed too
    assert shop.run("dead-letters", "requeue", escaped, "--force")[0] == 0
    assert ledger.owed() == sorted([escaped, other])


#: Wrong usage, and a word that the reader needs.
USAGE: dict[str, tuple[list[str], str]] = {
    "no command": ([], "command"),
    "an unknown command": (["nonsense"], "nonsense"),
    "an unknown action": (["dead-letters", "nonsense"], "nonsense"),
    "show nothing": (["dead-letters", "show"], "ID"),
    "requeue nothing": (["dead-letters", "requeue"], "ID"),
    "an action of another command": (["migrate", "list"], "list"),
    "no message": (["message"], "one id"),
    "two messages": (["message", "1", "2"], "one id"),
}


@pytest.mark.parametrize("what", USAGE)
def test_wrong_usage_is_refused(shop: Shop, what: str) -> None:
    # When something is missing or wrong
    arguments, word = USAGE[what]
    code, _, errors = shop.run(*arguments)

    # Then the exit code is that of wrong usage, and the reader hears what is wrong
    assert code == 2
    assert word.lower() in errors.lower()


def test_a_module_must_be_named(shop: Shop) -> None:
    code, _, errors = shop.run("migrate", broker="")
    assert code == 2
    assert "--broker" in errors


#: A command for a project that is not fit, and a word that the reader needs.
PROJECTS: dict[str, tuple[str, dict[str, str], str]] = {
    "no module": ("relay", {"broker": "nowhere"}, "nowhere"),
    "a module that lacks one": ("relay", {"broker": "wrong"}, "nowhere_to_be_found"),
    "another broker": ("relay", {"broker": "stock"}, "StubBroker"),
    "no ledger for a relay": ("relay", {"LEDGER": "no"}, "ledger"),
    "no ledger for dead letters": ("dead-letters", {"LEDGER": "no"}, "ledger"),
    "no guard for a relay": ("relay", {"GUARD": "no"}, "IdempotentConsumer"),
    "no guard for tables": ("migrate", {"GUARD": "no"}, "IdempotentConsumer"),
    "no DATABASE_URL for dead letters": ("dead-letters", {"DATABASE_URL": ""}, "DATABASE_URL"),
    "no DATABASE_URL for tables": ("migrate", {"DATABASE_URL": ""}, "DATABASE_URL"),
    "no DATABASE_URL for a relay": ("relay", {"DATABASE_URL": ""}, "DATABASE_URL"),
    "no REDIS_URL for a relay": ("relay", {"REDIS_URL": ""}, "REDIS_URL"),
    "no PostgreSQL": ("migrate", {"DATABASE_URL": "postgresql://postgres@127.0.0.1:1/x"}, "refused"),
}


@pytest.mark.parametrize("what", PROJECTS)
def test_what_is_wrong_with_a_project_is_said_in_a_sentence(shop: Shop, what: str) -> None:
    # Given a project that is not fit, when a command is run
    command, options, word = PROJECTS[what]
    code, _, errors = shop.run(command, **options)

    # Then the reader hears why it cannot
    assert code in (1, 2)
    assert word in errors


def test_message_tells_what_became_of_it(shop: Shop) -> None:
    # Given a message that failed for good
    (ident,) = dead(shop.stage, 1)

    # When it is asked for, as text and as JSON; then it is found
    code, output, _ = shop.run("message", ident)
    assert (code, output.split()[:3]) == (0, [">", "fails", "dead"])
    code, output, _ = shop.run("message", ident, "--json")
    assert (code, json.loads(output)["state"]) == (0, "dead")

    # And when nothing is known of one; then that is said
    code, output, errors = shop.run("message", "nobody")
    assert (code, output, errors) == (1, "", "Nothing is known of message nobody.\n")
