"""What a message carries: its key, the digest of its arguments, the types Dramatiq relies on.

Everything here is pure: it looks at a message and touches neither Redis nor PostgreSQL.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from math import inf
from typing import Any

from dramatiq import Message

from .errors import InvalidKey, InvalidMessage, InvalidResult

#: Counted up whenever `digest` changes, so that old rows are not taken for mismatches.
DIGEST_VERSION = 1

#: Two keys of this size still fit a B-tree row of 2,704 bytes (T13).
MAX_KEY_BYTES = 512

#: So many brackets are never nested too deeply; beyond that, so much of the stack must be spare.
SHALLOW, SPARE_FRAMES = 300, 250
#: More retries than this nobody means.
MOST_RETRIES = 1_000_000
#: The last millisecond of year 9999, in which PostgreSQL still computes.
LATEST_MS = 253_402_300_799_999

_encode_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_encode_result = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
_escaped_nul = re.compile(r"(?<!\\)(?:\\\\)*\\u0000").search


def valid_key(key: object, what: str, of: str, most: int = MAX_KEY_BYTES) -> str:
    """A key that PostgreSQL can store and index is returned as it is.

    Arguments:
      key: what was given.
      what: what it is ("the message id"), for the error.
      of: whose it is ("message 1234 for consumer pay"), for the error.
      most: how many bytes it may have.

    Raises:
      InvalidKey: it is no str, empty, longer than 512 UTF-8 bytes, or holds NUL or a lone
        surrogate (T13).
    """
    if not isinstance(key, str):
        reason = f"is of type {type(key).__name__}"
    elif not key:
        reason = "is empty"
    elif "\x00" in key:
        reason = "contains NUL"
    else:
        try:
            size = len(key.encode())
        except UnicodeEncodeError:
            reason = "contains a lone surrogate"
        else:
            if size <= most:
                return key
            reason = f"has {size} bytes"
    raise InvalidKey(f"{what} of {of} {reason}; it must be a str of 1 to {most} UTF-8 bytes without NUL.")


def key_of(message: Message[Any], consumer_name: str) -> str:
    """The second half of a message's key: its business key if it has one, else its id.

    Raises:
      InvalidKey: an empty or None key is invalid, not absent: leave the option out.
    """
    of = f"message {message.message_id!r} for consumer {consumer_name!r}"
    message_id = valid_key(message.message_id, "The message id", of)
    if "idempotency_key" not in message.options:
        return message_id
    return valid_key(message.options["idempotency_key"], "idempotency_key", of)


def digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """16 bytes that are equal for equal arguments, in whatever order the keywords came.

    Arguments:
      args, kwargs: anything that a Dramatiq encoder can carry: NUL, lone surrogates, NaN, and
        with a PickleEncoder any object that pickle can take apart.

    Raises:
      InvalidMessage: the arguments contain themselves.
    """
    try:
        try:
            text = _encode_sorted((args, kwargs))
        except (TypeError, ValueError):
            text = _encode_sorted(_canonical((args, kwargs)))
    except RecursionError as error:
        raise InvalidMessage("The arguments are nested too deeply, or contain themselves.") from error
    return blake2b(text.encode(), digest_size=16).digest()


def _canonical(value: Any) -> Any:
    """Rebuild what JSON does not know from what it knows, the type's name beside it."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        pairs = [[_canonical(key), _canonical(item)] for key, item in value.items()]
        return ["dict", sorted(pairs, key=_encode_sorted)]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted((_canonical(item) for item in value), key=_encode_sorted)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, type) or callable(value):
        return [
            "name",
            getattr(value, "__module__", ""),
            getattr(value, "__qualname__", str(value)),
        ]
    reduced = value.__reduce_ex__(2)
    # Of what pickle makes of it: arguments, state, and the items of a list or a dict.
    parts = [reduced] if isinstance(reduced, str) else [_canonical_part(part) for part in reduced[1:5]]
    kind = type(value)
    return ["object", kind.__module__, kind.__qualname__, *parts]


def _canonical_part(part: Any) -> Any:
    return [_canonical(item) for item in part] if hasattr(part, "__next__") else _canonical(part)


def result_as_json(result: Any, of: str) -> str:
    """The result as a text that PostgreSQL takes for ``jsonb``.

    Raises:
      InvalidResult: JSON does not know its type, or PostgreSQL does not: NaN, infinity, NUL, lone
        surrogates (T13).
    """
    try:
        text = _encode_result(result)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidResult(
            f"The result of {of} cannot be stored: {error}. Return what JSON can hold."
        ) from error
    if _escaped_nul(text):
        raise InvalidResult(f"The result of {of} cannot be stored: it contains NUL. Remove it.")
    return text


def check_depth(raw: bytes, message: Message[Any]) -> None:
    """A message that leaves Python some stack wherever it is looked at passes.

    Raises:
      InvalidMessage: its arguments are nested too deeply to be printed; a handler of a log that tries
        would end the worker's thread (T13).
    """
    if raw.count(b"[") + raw.count(b"{") > SHALLOW:
        try:
            _with_less_stack(SPARE_FRAMES, message)
        except RecursionError:
            raise InvalidMessage("The arguments are nested too deeply.") from None


def _with_less_stack(frames: int, message: Message[Any]) -> None:
    if frames:
        _with_less_stack(frames - 1, message)
    else:
        repr(message)


_TYPES: dict[str, tuple[type, ...]] = {
    "queue_name": (str,),
    "actor_name": (str,),
    "args": (tuple,),
    "kwargs": (dict,),
    "options": (dict,),
    "message_id": (str,),
    "message_timestamp": (int, float),
}
#: The options with which Retries, TimeLimit and AgeLimit compute: a wrong type there raises in a
#: hook, after the body, when nobody can decide what becomes of the message.
_NUMBERS = (
    "retries",
    "max_retries",
    "min_backoff",
    "max_backoff",
    "time_limit",
    "max_age",
)


def check_fields(message: Message[Any]) -> None:
    """A message whose fields and options have the types that Dramatiq computes with passes.

    Raises:
      InvalidMessage: names the field, its type and the right one (T21).
      InvalidKey: its business key cannot be stored.
    """
    for name, types in _TYPES.items():
        if not isinstance(getattr(message, name), types):
            wrong = type(getattr(message, name)).__name__
            raise InvalidMessage(f"{name} is of type {wrong}; it must be {types[0].__name__}.")
    for name, most in (("message_id", MAX_KEY_BYTES), ("actor_name", 1024), ("queue_name", 1024)):
        try:
            valid_key(getattr(message, name), name, "the message", most)
        except InvalidKey as error:
            raise InvalidMessage(str(error)) from None
    if "idempotency_key" in message.options:
        valid_key(message.options["idempotency_key"], "idempotency_key", f"message {message.message_id!r}")
    _check_options(message.options)


def _check_options(options: dict[str, Any]) -> None:
    for name in _NUMBERS:
        value = options.get(name, 0)
        if value is None and name != "retries":
            continue
        if name == "time_limit" and value == inf:
            continue
        largest = MOST_RETRIES if name.endswith("retries") else LATEST_MS
        if type(value) not in (int, float) or not 0 <= value <= largest:  # NaN is neither
            raise InvalidMessage(f"Option {name} is {value!r}; it must be a number from 0 to {largest}.")
    eta: Any = options.get("eta")
    if type(eta) in (int, float) and not 0 <= eta <= LATEST_MS:
        raise InvalidMessage(f"Option eta is {eta!r}; it must be milliseconds since 1970, before year 10000.")
    undo = options.get("undo")
    if undo is not None and not _is_message(undo):
        raise InvalidMessage("Option undo is no message; it is written by a pipeline, and by nobody else.")
    throws = options.get("throws") or ()
    if not all(isinstance(one, type) for one in (throws if isinstance(throws, tuple) else (throws,))):
        raise InvalidMessage(f"Option throws is {throws!r}; it must be an exception class or several.")


def _is_message(fields: Any) -> bool:
    """Whether these are the fields of a message that can be sent."""
    try:
        undo: Message[Any] = Message(**fields)
        check_fields(undo._replace(options={}))
    except (TypeError, InvalidMessage, InvalidKey):
        return False
    return True
