"""`manage.py message`: what became of a message, for people and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from manage import manage
from models import database

from .burials import bury

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result

    from .servers import Servers


@pytest.fixture(autouse=True)
def _tables(clean: Servers) -> Iterator[None]:
    yield
    clean.start()
    database.close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(manage, ["message", *arguments])


def test_each_message_is_a_line_below_the_one_that_set_it_off() -> None:
    # Given a dead letter whose message another dead one had set off
    first = bury(error_text="no stock")
    second = bury(parent_id=first.message_id)

    # When the second is asked for
    result = run(str(second.message_id))

    # Then both are shown, and the second is marked
    assert result.exit_code == 0
    above, below = result.output.splitlines()
    assert above.startswith("  reserve_stock  dead  ")
    assert above.endswith(f"  {first.message_id}  attempt 3  (no retry left: no stock)")
    assert below.startswith(">   reserve_stock  dead  ")
    assert str(second.message_id) in below


def test_as_json_it_is_one_object() -> None:
    # Given a dead letter; when it is asked for as JSON
    letter = bury()
    shown = json.loads(run(str(letter.message_id), "--json").output)

    # Then it is one object, with what it set off inside
    assert (shown["message_id"], shown["state"], shown["sets_off"]) == (letter.message_id, "dead", [])


def test_a_message_that_nobody_knows_is_a_finding() -> None:
    # Given no message; when one is asked for; then that is said
    result = run("7")
    assert (result.exit_code, result.output) == (1, "Nothing is known of message 7.\n")


@pytest.mark.parametrize("arguments", [[], ["1", "2"], ["1", "--nonsense"]])
def test_wrong_usage_is_refused(arguments: list[str]) -> None:
    # When something is missing or wrong, then the exit code is that of wrong usage
    assert run(*arguments).exit_code == 2


def test_a_postgresql_that_is_away_is_said_in_a_sentence(clean: Servers) -> None:
    # Given a PostgreSQL that is away; when a message is asked for; then the reader hears of that
    clean.postgres.stop()
    result = run("7")
    assert result.exit_code == 1
    assert result.output.startswith("Error: PostgreSQL says: ")
