"""The orders API."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify, request
from werkzeug.exceptions import BadRequest, UnprocessableEntity

from actors import fulfil
from models import Order, Stock, database

#: The largest number that the column can hold.
LARGEST_QUANTITY = 2**31 - 1

orders = Blueprint("orders", __name__)


@orders.post("/orders")
def place_order() -> tuple[Response, int]:
    """Store an order and set it going.

    Its first message is written with the order and leaves with the commit: there is no order without
    its message and no message without its order, whether Redis is there or not.

    Returns:
      202 with the order's id and state; 400 for a body that is no order, 422 for an unknown SKU.
    """
    asked = _read_order(request.get_json())
    with database.atomic():
        if not Stock.select().where(Stock.sku == asked["sku"]).exists():
            raise UnprocessableEntity(f"There is no article with the SKU {asked['sku']!r}.")
        order = Order.create(**asked)
        fulfil(order.id)  # leaves with the commit
    return jsonify(id=order.id, state=order.state), 202


def _read_order(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest("Send a JSON object with sku, quantity and customer.")
    quantity = body.get("quantity")
    # JSON's true is an int for Python.
    if type(quantity) is not int or not 1 <= quantity <= LARGEST_QUANTITY:
        raise BadRequest(f"quantity must be a whole number from 1 to {LARGEST_QUANTITY}.")
    return {
        "sku": _read_text(body, "sku"),
        "quantity": quantity,
        "customer": _read_text(body, "customer"),
    }


def _read_text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} must be a text that is not empty.")
    # PostgreSQL stores neither of the two, and JSON can carry both.
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRequest(f"{name} must not contain a NUL character or half of a surrogate pair.")
    return value
