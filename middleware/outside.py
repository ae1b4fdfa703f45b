"""What a body needs whose effects are outside the database: a key that the other side understands."""

from __future__ import annotations

from hashlib import blake2b

from .delivery import current
from .errors import NotExternal


def idempotency_key(label: str) -> str:
    """The key of one outside effect of the message in hand: the same in every attempt.

    Arguments:
      label: which effect of the body, such as "charge"; another label gives another key.

    Returns:
      32 ASCII characters, derived from consumer name, message id (or business key) and label.

    Raises:
      NotExternal: no body of an actor with ``idempotency="external"`` runs in this thread.
    """
    delivery = current.delivery
    if delivery is None or delivery.outside is None or not delivery.running:
        raise NotExternal(
            f"idempotency_key({label!r}) was called where no body of an actor with "
            f'idempotency="external" runs: declare the actor so, and call it in the body, in its own thread.'
        )
    text = "\0".join((*delivery.outside, label))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
