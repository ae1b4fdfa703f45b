"""Customers are charged, and get their money back, at a service outside: each at most once.

The bodies may run more than once, so each request carries a key that is the same in every attempt.
"""

from __future__ import annotations

from typing import Any

import dramatiq
import httpx

import settings
from middleware import idempotency_key
from models import Order, OrderState

from .broker import broker

#: Less than the service keeps a silent connection, so that none is used that it has just closed.
KEEP_ALIVE_S = 2.0

#: A service that is away may come back soon.
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 500, 60_000


#: It connects to nothing before its first request, so each worker process has connections of its own.
client = httpx.Client(
    base_url=settings.PAYMENTS_URL,
    timeout=settings.PAYMENTS_TIMEOUT_MS / 1_000,
    limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
    trust_env=False,
)


class ChargeRefusedError(Exception):
    """The payment service refuses to charge this customer: trying again cannot help."""


@dramatiq.actor(
    broker=broker,
    idempotency="external",
    undone_by="refund",
    throws=ChargeRefusedError,
    min_backoff=FIRST_PAUSE_MS,
    max_backoff=LONGEST_PAUSE_MS,
)
def charge(order_id: int) -> list[int | None]:
    """Charge the customer of an order that is reserved.

    Arguments:
      order_id: what `reserve_stock` returned.

    Returns:
      The id of the order, and that of the charge: None if the order was rejected.

    Raises:
      ChargeRefusedError: then the order is cancelled.
      httpx.HTTPError: no answer, or a wrong one; it is asked for again, with the same key.
    """
    order = Order.get_by_id(order_id)
    if order.state != OrderState.RESERVED:
        return [order_id, None]
    asked = {
        "customer": order.customer,
        "amount_cents": order.amount_cents,
        "reference": f"order {order_id}",
    }
    answer = _post("/charges", idempotency_key("charge"), asked)
    if answer.status_code == httpx.codes.PAYMENT_REQUIRED:
        raise ChargeRefusedError(f"Order {order_id}: {answer.json()['error']}")
    answer.raise_for_status()
    return [order_id, answer.json()["id"]]


@dramatiq.actor(
    broker=broker,
    idempotency="external",
    min_backoff=FIRST_PAUSE_MS,
    max_backoff=LONGEST_PAUSE_MS,
)
def refund(_step: dict[str, Any], charged: list[int | None]) -> None:
    """Give a customer the money back.

    Arguments:
      charged: what `charge` returned.
    """
    _order_id, charge_id = charged
    if charge_id is not None:
        _post(f"/charges/{charge_id}/refunds", idempotency_key("refund")).raise_for_status()


def _post(path: str, key: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return client.post(path, json=body, headers={"Idempotency-Key": key})
