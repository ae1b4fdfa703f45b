"""`manage.py dead-letters`: what a person sees, and how the command says what it found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from actors import reserve_stock
from models import DeadLetter, database

from .burials import bury, owed, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .servers import Servers


@pytest.fixture(autouse=True)
def _tables(clean: Servers) -> Iterator[None]:
    yield
    clean.start()
    database.close()


def test_no_dead_letter_is_well() -> None:
    # When there is none, then the list says so
    assert run("list").output == "There are no dead letters.\n"
    assert run("list").exit_code == run("list", "--json").exit_code == 0
    assert run("list", "--json").output == ""


def test_a_list_shows_the_newest_first_and_is_a_finding() -> None:
    # Given three
    ids = [bury().message_id for _ in range(3)]

    # When they are listed
    listed = run("list", "--limit", "2", "--json")

    # Then there is a line for each, all that is known in it
    rows = [json.loads(line) for line in listed.output.splitlines()]
    assert listed.exit_code == 1
    assert [row["message_id"] for row in rows] == [ids[2], ids[1]]
    assert set(rows[0]) == set(DeadLetter._meta.fields)


def test_a_list_for_a_person_has_ids_that_can_be_copied() -> None:
    # Given one whose text would be markup
    letter = bury(error_class="[/b]", consumer_name="[red]")

    # When it is listed in a narrow terminal, or into a pipe
    text = run("list").output

    # Then its ids are whole, and its text is as it is
    assert str(letter.id) in text
    assert str(letter.message_id) in text
    assert "[/b]" in text


@pytest.mark.parametrize("by", ["message_id", "id"])
def test_one_is_shown_by_the_id_of_its_message_or_its_row(by: str) -> None:
    # Given two
    letter, other = bury(error_text="what went wrong"), bury()

    # When one is shown
    shown = run("show", str(getattr(letter, by)))

    # Then all that is known of it is there, and nothing of the other
    assert shown.exit_code == 0
    assert "error_text: what went wrong" in shown.output
    assert str(other.message_id) not in shown.output


def test_all_dead_letters_of_a_message_are_shown() -> None:
    # Given two of one message
    message = reserve_stock.message(1)
    first, second = bury(message), bury(message)

    # When it is shown
    lines = run("show", message.message_id, "--json").output.splitlines()

    # Then both are there
    assert [json.loads(line)["id"] for line in lines] == [first.id, second.id]


@pytest.mark.parametrize("command", ["show", "requeue", "discard"])
def test_an_id_that_is_not_there_is_a_finding_and_the_others_are_done(command: str) -> None:
    # Given one
    letter = bury()

    # When another is named too
    result = run(command, "77", str(letter.id))

    # Then it is named, the exit code says so, and the one that is there was done
    assert result.exit_code == 1
    assert "77" in result.output
    assert str(letter.message_id) in result.output


@pytest.mark.parametrize(
    "arguments",
    [["show"], ["requeue"], ["discard"], ["nonsense"], ["list", "--limit", "-1"], ["list", "--limit", "x"]],
)
def test_wrong_usage_is_refused(arguments: list[str]) -> None:
    # When something is missing or wrong, then the exit code is that of wrong usage
    assert run(*arguments).exit_code == 2


def test_discarding_deletes_for_good() -> None:
    # Given two
    letter, other = bury(), bury()

    # When one is discarded
    result = run("discard", str(letter.message_id))

    # Then the other is left, and nothing is owed
    assert result.exit_code == 0
    assert [left.id for left in DeadLetter.select()] == [other.id]
    assert owed() == []


@pytest.mark.parametrize("arguments", [["list"], ["show", "1"], ["requeue", "1"], ["discard", "1"]])
def test_a_postgresql_that_is_away_is_said_in_a_sentence(clean: Servers, arguments: list[str]) -> None:
    # Given a PostgreSQL that is away
    clean.postgres.stop()

    # When a command asks it, then the reader hears of that
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith("Error: PostgreSQL says: ")


def test_a_redis_that_is_away_is_said_in_a_sentence(clean: Servers) -> None:
    # Given a Redis that is away, when its dead letters are asked for, then the reader hears of that
    clean.redis.stop()
    result = run("list", "--redis")
    assert result.exit_code == 1
    assert result.output.startswith("Error: Redis says: ")
