"""`middleware.ends` and `docs/design/endings.md` say the same of every SQLSTATE."""

from __future__ import annotations

import re

import peewee
import psycopg2
import pytest
from psycopg2 import errors

from middleware.ends import SQLSTATES, SQLSTATES_AT_BEGIN, End, look_up, sqlstate_of

from .servers import PROJECT

ROW = re.compile(r"^\| ([0-9A-Z]{2,5}|anything else) \| ([a-z ]+) \| ([a-z ]+) \|$", re.MULTILINE)
DOCUMENTED = {
    state: (begin, later)
    for state, begin, later in ROW.findall((PROJECT / "docs/design/endings.md").read_text("utf-8"))
}


def ends_of(sqlstate: str) -> tuple[str, str]:
    """The words for what a SQLSTATE means while the transaction begins, and later."""
    begin = look_up(SQLSTATES_AT_BEGIN, sqlstate, End.WAIT)
    return begin.value, look_up(SQLSTATES, sqlstate, End.FAIL).value


@pytest.mark.parametrize("sqlstate", sorted({*SQLSTATES, *SQLSTATES_AT_BEGIN}))
def test_every_sqlstate_of_the_code_is_in_the_document(sqlstate: str) -> None:
    assert DOCUMENTED[sqlstate] == ends_of(sqlstate)


@pytest.mark.parametrize("sqlstate", sorted(DOCUMENTED))
def test_every_sqlstate_of_the_document_means_the_same_in_the_code(sqlstate: str) -> None:
    assert DOCUMENTED[sqlstate] == ends_of("XX000" if sqlstate == "anything else" else sqlstate)


@pytest.mark.parametrize(
    ("sqlstate", "like"),
    [
        ("53100", "53"),
        ("53300", "53"),
        ("57P01", "57P"),
        ("57P03", "57P"),
        ("57014", "anything else"),
        ("08006", "08"),
        ("58030", "58"),
        ("25006", "25006"),
        ("25P02", "anything else"),
        ("23505", "23"),
        ("42P01", "anything else"),
        ("40003", "anything else"),
    ],
)
def test_a_sqlstate_is_looked_up_whole_then_by_its_longest_prefix(sqlstate: str, like: str) -> None:
    assert ends_of(sqlstate) == DOCUMENTED[like]


def test_the_sqlstate_of_an_error_is_found_behind_peewees_own_t26() -> None:
    # Given an error of psycopg2 as peewee hands it on
    try:
        with vars(peewee)["__exception_wrapper__"]:
            raise errors.lookup("55P03")("held")
    except peewee.OperationalError as error:
        wrapped = error
    # An error that was made here has no SQLSTATE; that of the server has, see test_endings_of_locks.
    assert sqlstate_of(wrapped) is None
    assert sqlstate_of(psycopg2.OperationalError("server closed the connection")) is None
    assert sqlstate_of(ValueError("no")) is None
    assert sqlstate_of(None) is None
