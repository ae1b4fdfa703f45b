"""The digest of a payload and the JSON of a result, for whatever Dramatiq can carry (T13)."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware.errors import InvalidMessage, InvalidResult
from middleware.payload import digest, result_as_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .servers import Servers

#: Texts with NUL and lone surrogates among them.
TEXTS = st.text(st.characters(exclude_categories=[]), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20)
#: What else a PickleEncoder brings along.
OBJECTS = st.recursive(
    SCALARS
    | st.binary()
    | st.dates()
    | st.datetimes()
    | st.decimals()
    | st.uuids()
    | st.frozensets(st.integers() | TEXTS),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXTS | st.integers() | st.dates(), inner)
    ),
    max_leaves=20,
)


@dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Colour(Enum):
    RED = 1
    BLUE = 2


def turned_round(value: Any) -> Any:
    """The same value with every dict in the reverse order."""
    if isinstance(value, dict):
        return {key: turned_round(item) for key, item in reversed(value.items())}
    if isinstance(value, list | tuple):
        return type(value)(turned_round(item) for item in value)
    return value


def named(value: object) -> str:
    """The name of a case; without the addresses of objects, it is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", ascii(value))


@given(st.lists(JSON, max_size=3), st.dictionaries(TEXTS, JSON, max_size=5))
def test_the_digest_does_not_depend_on_the_order_of_keywords(args: list[Any], kwargs: dict[str, Any]) -> None:
    first = digest(tuple(args), kwargs)
    assert len(first) == 16
    assert digest(turned_round(tuple(args)), turned_round(kwargs)) == first


@given(st.lists(JSON, max_size=3), st.dictionaries(TEXTS, JSON, max_size=5))
def test_the_digest_is_the_same_after_a_journey_as_json(args: list[Any], kwargs: dict[str, Any]) -> None:
    arrived = json.loads(json.dumps([args, kwargs]))
    assert digest(tuple(arrived[0]), arrived[1]) == digest(tuple(args), kwargs)


@given(OBJECTS)
def test_the_digest_takes_whatever_pickle_carries_in_any_order(value: Any) -> None:
    assert digest((value,), {}) == digest((turned_round(value),), {})


@given(JSON, JSON)
def test_different_arguments_have_different_digests(one: Any, other: Any) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (digest((one,), {}) == digest((other,), {})) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), ("",)),
        ((1,), ("1",)),
        ((1,), (1.0,)),
        ((1,), (True,)),
        ((None,), ("null",)),
        ((b"a",), ("a",)),
        ((b"a",), (b"b",)),
        ((frozenset({1}),), ([1],)),
        ((Decimal(1),), (1,)),
        ((Decimal("1.0"),), (Decimal("1.00"),)),
        ((date(2026, 1, 1),), (date(2026, 1, 2),)),
        ((datetime(2026, 1, 1, tzinfo=UTC),), (date(2026, 1, 1),)),
        ((Money(Decimal(1), "EUR"),), (Money(Decimal(1), "USD"),)),
        ((Plain(a=1),), (Plain(a=2),)),
        ((Colour.RED,), (Colour.BLUE,)),
        ((UUID(int=1),), (UUID(int=2),)),
        (({1: "a"},), ({1: "b"},)),
        ((["ab", "c"],), (["a", "bc"],)),
        (([1, [2]],), ([[1], 2],)),
    ],
    ids=named,
)
def test_what_differs_has_another_digest(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert digest(one, {}) != digest(other, {})


def test_objects_with_equal_attributes_have_equal_digests_in_whatever_order_they_were_set() -> None:
    assert digest((Plain(a=1, b={2: 3, 4: 5}),), {}) == digest((Plain(b={4: 5, 2: 3}, a=1),), {})
    assert digest((Money(Decimal(1), "EUR"),), {}) == digest((Money(Decimal(1), "EUR"),), {})
    assert digest((Colour.RED,), {}) == digest((Colour.RED,), {})


def test_arguments_that_contain_themselves_are_refused_in_words() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidMessage, match="contain themselves"):
        digest((loop,), {})


@pytest.mark.parametrize(
    "result",
    [math.nan, math.inf, [1, -math.inf], "a\x00b", {"a\x00": 1}, "\\\x00", "\ud800", {"\udfff": 1}, object(),
     {1, 2}, b"bytes", Decimal(1), datetime(2026, 1, 1, tzinfo=UTC)],
    ids=named,
)  # fmt: skip
def test_a_result_that_postgresql_cannot_hold_is_refused_in_words_t13(result: Any) -> None:
    with pytest.raises(InvalidResult, match="result of message 1 cannot be stored"):
        result_as_json(result, "message 1")


def test_a_result_that_contains_itself_is_refused_in_words_t13() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidResult):
        result_as_json(loop, "message 1")


@pytest.fixture(scope="module")
def connection(servers: Servers) -> Iterator[Any]:
    connection = psycopg2.connect(servers.postgres.url)
    yield connection
    connection.close()


@settings(max_examples=200, deadline=None)
@given(result=JSON)
def test_a_result_that_is_not_refused_comes_back_from_jsonb_t13(connection: Any, result: Any) -> None:
    # Given anything that JSON may hold
    try:
        text = result_as_json(result, "message 1")
    except InvalidResult:
        return
    # When PostgreSQL has had it
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::jsonb", (text,))
        (stored,) = cursor.fetchone()
    # Then it is the same, but that JSON does not tell 1e16 from the whole number
    assert numbers_as_floats(stored) == numbers_as_floats(result)


def numbers_as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: numbers_as_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers_as_floats(item) for item in value]
    with suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else value
    return value


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "a\\", "'", "\u2028", "\U0010ffff"], ids=ascii)
def test_a_text_that_only_looks_odd_is_stored_t13(text: str) -> None:
    assert json.loads(result_as_json(text, "message 1")) == text
