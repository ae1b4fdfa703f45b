"""The API: charge, refund, and look at what was charged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, current_app, jsonify, request
from werkzeug.exceptions import BadRequest, NotFound, UnprocessableEntity

from .behaviour import after, asked_of, before

if TYPE_CHECKING:
    import sqlite3

    from .store import Answer, Store

charges = Blueprint("charges", __name__)

LARGEST_AMOUNT = 2**53


@charges.post("/charges")
def charge() -> Response:
    """Charge a customer, once for each Idempotency-Key.

    Returns:
      201 with the charge's id; 402 if it is refused, 400 without a key or for a body that is no charge,
      409 while the same key is worked at, 422 for a key that was used for something else.
    """
    key, asked = _key(), _read_charge(request.get_json())
    behaviour = asked_of(asked["customer"])

    def act(db: sqlite3.Connection) -> Answer:
        if "refuse" in behaviour:
            return 402, json.dumps({"error": "The card was refused."})
        row = db.execute(
            "INSERT INTO charges (customer, amount_cents, reference) VALUES (:customer, :amount_cents, "
            ":reference) RETURNING id",
            asked,
        )
        return 201, json.dumps({"id": row.fetchone()[0], **asked})

    fingerprint = json.dumps(["charge", asked], sort_keys=True)
    answer, attempt = _store().once(key, fingerprint, lambda attempt: before(behaviour, attempt), act)
    after(behaviour, attempt)
    return _response(answer)


@charges.post("/charges/<int:charge_id>/refunds")
def refund(charge_id: int) -> Response:
    """Give a charge back, once for each Idempotency-Key.

    Returns:
      201 with the refund's id; 404 for an unknown charge, 422 for one that is refunded; else as `charge`.
    """

    def act(db: sqlite3.Connection) -> Answer:
        if db.execute("SELECT 1 FROM charges WHERE id = ?", (charge_id,)).fetchone() is None:
            raise NotFound(f"There is no charge {charge_id}.")
        row = db.execute(
            "INSERT INTO refunds (charge_id) VALUES (?) ON CONFLICT DO NOTHING RETURNING id", (charge_id,)
        ).fetchone()
        if row is None:
            raise UnprocessableEntity(f"Charge {charge_id} is refunded already.")
        return 201, json.dumps({"id": row[0], "charge_id": charge_id})

    answer, _ = _store().once(_key(), json.dumps(["refund", charge_id]), lambda _: None, act)
    return _response(answer)


@charges.get("/charges")
def list_charges() -> Response:
    """All charges, each with whether it was refunded."""
    with _store().transaction() as db:
        rows = db.execute(
            "SELECT charges.id, customer, amount_cents, reference, refunds.id IS NOT NULL "
            "FROM charges LEFT JOIN refunds ON charge_id = charges.id ORDER BY charges.id"
        ).fetchall()
    names = "id", "customer", "amount_cents", "reference", "refunded"
    return jsonify([{**dict(zip(names, row, strict=True)), "refunded": bool(row[-1])} for row in rows])


def _store() -> Store:
    store: Store = current_app.extensions["store"]
    return store


def _key() -> str:
    key = request.headers.get("Idempotency-Key", "")
    if not key or len(key) > 255:
        raise BadRequest("Send an Idempotency-Key of 1 to 255 characters.")
    return key


def _read_charge(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest("Send a JSON object with customer, amount_cents and reference.")
    amount_cents = body.get("amount_cents")
    if type(amount_cents) is not int or not 1 <= amount_cents <= LARGEST_AMOUNT:
        raise BadRequest(f"amount_cents must be a whole number from 1 to {LARGEST_AMOUNT}.")
    texts = {name: body.get(name) for name in ("customer", "reference")}
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise BadRequest(f"{name} must be a text that is not empty.")
    return {**texts, "amount_cents": amount_cents}


def _response(answer: Answer) -> Response:
    status, text = answer
    return Response(text, status, mimetype="application/json")
