"""What is refused when an actor is declared, and what is agreed with Dramatiq's Retries."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dramatiq.asyncio import async_to_sync

from . import payload
from .errors import ConfigurationError, InvalidKey, PermanentError
from .periodic import check_periodic

if TYPE_CHECKING:
    from dramatiq import Actor

#: The values of our actor options; the first is the default.
IDEMPOTENCY = ("transaction", "external", "off")
ON_MISMATCH = ("refuse", "answer")


async def _probe() -> None: ...


#: All functions that Dramatiq makes of async ones share this code.
_ASYNC_WRAPPER = async_to_sync(_probe).__code__


def check_actor(actor: Actor[Any, Any]) -> None:
    """An actor that can be guarded, with options that we know, passes.

    Raises:
      ConfigurationError: says what to change.
    """
    name, options = actor.actor_name, actor.options
    _one_of(name, "idempotency", options.get("idempotency", IDEMPOTENCY[0]), IDEMPOTENCY)
    _one_of(name, "on_mismatch", options.get("on_mismatch", ON_MISMATCH[0]), ON_MISMATCH)
    idle_limit_ms = options.get("idle_limit_ms", 0)
    if type(idle_limit_ms) is not int or not 0 <= idle_limit_ms < 2**31:
        raise ConfigurationError(
            f"Actor {name!r}: idle_limit_ms is {idle_limit_ms!r}; it must be a number of "
            f"milliseconds such as 300000, or 0 for no limit."
        )
    try:
        payload.valid_key(options.get("consumer_name", name), "consumer_name", f"actor {name!r}")
    except InvalidKey as error:
        raise ConfigurationError(str(error)) from None
    undone_by = options.get("undone_by")
    if undone_by is not None and not isinstance(undone_by, str):
        raise ConfigurationError(
            f"Actor {name!r}: undone_by is {undone_by!r}; it must be the name of an actor, as a str."
        )
    check_periodic(actor)
    if options.get("idempotency") != "off" and _is_async(actor.fn):
        raise ConfigurationError(
            f"Actor {name!r} is async: it runs on another thread, hence on another connection, and "
            f"its writes would escape the transaction of its key. Make it a plain function, or "
            f'declare it with idempotency="off".'  # T8
        )


def _one_of(actor_name: str, option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigurationError(
            f"Actor {actor_name!r}: {option} is {value!r}; it must be "
            f"{' or '.join(repr(one) for one in known)}."
        )


def _is_async(fn: Any) -> bool:
    return getattr(fn, "__code__", None) is _ASYNC_WRAPPER or inspect.iscoroutinefunction(fn)


def forbid_retries(actor: Actor[Any, Any]) -> None:
    """Errors that trying again cannot help are among what the actor `throws`.

    Retries then fails the message at once, on any broker and whatever `retry_when` says.
    """
    throws = actor.options.get("throws") or ()
    known = throws if isinstance(throws, tuple) else (throws,)
    actor.options["throws"] = (*known, PermanentError)
