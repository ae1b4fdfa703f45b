"""Every error of Onetake, in one tree.

A class says in one sentence what happened and what to do; the text of an instance adds to
which message and consumer.
"""

from __future__ import annotations

from dramatiq.middleware import MiddlewareError, SkipMessage


class OnetakeError(Exception):
    """The root: catch it to catch everything that Onetake raises on purpose."""


class ConfigurationError(OnetakeError, MiddlewareError):
    """A setting, an actor or a worker is not fit to run; the text names it and a right value.

    A MiddlewareError, because Dramatiq lets only these out of its hooks (T1).
    """


class DeliveryError(OnetakeError):
    """A delivery could not be performed; it is retried as any failed actor is."""


class TransactionAborted(DeliveryError):
    """The body caught a database error and went on: PostgreSQL can only roll back now.

    Let the error out of the actor, or put the statement that may fail into
    ``with database.atomic():`` (a savepoint) and catch the error around that block (T2).
    """


class LimitExceeded(DeliveryError):
    """PostgreSQL closed the connection because the body was silent, or open, for too long.

    Raise the limit that the text names, or split the actor.
    """


class NoDelivery(DeliveryError):
    """An actor was called in a worker thread to which no message was handed.

    A hook of a middleware failed before ours ran; its error is in the log. Without a message
    there is no key, so the actor was not run (T1).
    """


class PermanentError(OnetakeError):
    """Trying again cannot help: the message becomes a dead letter at once."""


class InvalidMessage(PermanentError):
    """A field or an option of the message has a type that Dramatiq cannot work with."""


class InvalidKey(PermanentError, MiddlewareError):
    """A key is no str of 1 to 512 UTF-8 bytes without NUL; send a valid one.

    A MiddlewareError, because it is also raised where a message is sent (T1, T13).
    """


class InvalidResult(PermanentError):
    """The result is nothing that JSON and PostgreSQL can hold; return something else (T13)."""


class PayloadMismatch(PermanentError):
    """The key was used before with other arguments.

    Give other work another key, or declare the actor with ``on_mismatch="answer"`` if the
    stored result is the right answer all the same.
    """


class TransactionEscaped(PermanentError):
    """The body ended the transaction of its key, or tried to.

    Remove the commit, rollback or close from the actor; ``with database.atomic():`` inside
    an actor is a savepoint and allowed (T3).
    """


class NotExternal(PermanentError):
    """`idempotency_key()` was called where no body with outside effects runs.

    Declare the actor with ``idempotency="external"``, and call it in the body, in the body's thread.
    """


class SentInsideTransaction(PermanentError):
    """A body with outside effects sent a message inside a transaction of its own.

    What such a body sends leaves with the transaction that comes after it. Send outside the block.
    """


class Cancelled(PermanentError):
    """The message was cancelled before it ran: it counts as failed, and leaves no dead letter."""


class NotRequeued(OnetakeError):
    """A dead letter is not sent again; the text says why, and what can be done."""


class MessageTooLarge(OnetakeError, MiddlewareError):
    """The encoded message is larger than max_message_bytes; store what is large and send its id."""


class NotDecided(PermanentError):
    """The body failed, and nothing in the middleware stack stored a retry or failed it."""


class WaitInsideTransaction(OnetakeError):
    """The result of a message that leaves with the commit was waited for before the commit.

    The same for what a body with outside effects sends: it leaves when the body has ended.
    """


class GivenBack(OnetakeError, SkipMessage):
    """The delivery ended without an outcome; its message goes back to its queue.

    A SkipMessage, because Dramatiq then neither retries nor fails the message (T22).
    """
