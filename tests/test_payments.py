"""The payment service: one charge for each Idempotency-Key, and how it can be told to misbehave."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import settings
from payments import behaviour, create_app

from .processes import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flask.testing import FlaskClient
    from werkzeug.test import TestResponse

    from .payment_service import PaymentService

pytest_plugins = ("tests.payment_service",)


@pytest.fixture
def client(tmp_path: Path) -> FlaskClient:
    """A client of a service without charges."""
    return create_app(tmp_path / "new" / "payments.sqlite").test_client()


def body_for(customer: str = "ada@example.org", **changes: Any) -> dict[str, Any]:
    return {"customer": customer, "amount_cents": 500, "reference": "order 1", **changes}


@pytest.fixture
def charge(client: FlaskClient) -> Callable[..., TestResponse]:
    """Asks for a charge under a key."""

    def ask(key: str, customer: str = "ada@example.org", **changes: Any) -> TestResponse:
        return client.post("/charges", json=body_for(customer, **changes), headers={"Idempotency-Key": key})

    return ask


def test_a_key_charges_once_and_gets_the_same_answer_byte_for_byte(
    client: FlaskClient, charge: Callable[..., TestResponse]
) -> None:
    # When a charge is asked for three times under one key, and once under another
    same = [charge("a") for _ in range(3)]
    other = charge("b")

    # Then there are two charges, and the three answers are one
    assert [answer.status_code for answer in (*same, other)] == [201] * 4
    assert len({answer.data for answer in same}) == 1
    ids = [(answer.json or {})["id"] for answer in (same[0], other)]
    assert [one["id"] for one in client.get("/charges").json or []] == ids


@pytest.mark.parametrize("change", [{"amount_cents": 501}, {"customer": "bob@example.org"}])
def test_a_key_that_comes_with_another_charge_is_refused(
    client: FlaskClient, charge: Callable[..., TestResponse], change: dict[str, Any]
) -> None:
    # Given a charge; when its key comes with another; then it is refused, and nothing more is charged
    assert charge("a").status_code == 201
    assert charge("a", **change).status_code == 422
    assert len(client.get("/charges").json or []) == 1


@pytest.mark.parametrize(
    "body",
    [[], {}, body_for(amount_cents=0), body_for(amount_cents=1.5), body_for(amount_cents=True), body_for("")],
    ids=str,
)
def test_what_is_no_charge_is_refused_and_not_remembered(client: FlaskClient, body: Any) -> None:
    # When something else is asked for under a key, then it is refused, and the key is free
    headers = {"Idempotency-Key": "a"}
    assert client.post("/charges", json=body, headers=headers).status_code == 400
    assert client.post("/charges", json=body_for(), headers=headers).status_code == 201


@pytest.mark.parametrize("path", ["/charges", "/charges/1/refunds"])
def test_without_a_key_nothing_is_done(client: FlaskClient, path: str) -> None:
    answer = client.post(path, json=body_for())
    assert answer.status_code == 400
    assert "Idempotency-Key" in (answer.json or {})["error"]


def test_a_refusal_is_remembered(client: FlaskClient, charge: Callable[..., TestResponse]) -> None:
    # When a customer who refuses is charged twice under one key; then nothing is charged
    answers = [charge("a", "ada+refuse@example.org") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [402, 402]
    assert client.get("/charges").json == []


def test_a_failure_on_purpose_comes_once_and_charges_nothing(
    client: FlaskClient, charge: Callable[..., TestResponse]
) -> None:
    # When a customer is charged three times under one key who fails; then it fails once
    answers = [charge("a", "ada+fail@example.org") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500, 201, 201]
    assert len(client.get("/charges").json or []) == 1


def test_a_charge_is_refunded_once(client: FlaskClient, charge: Callable[..., TestResponse]) -> None:
    # Given a charge
    ident = (charge("a").json or {})["id"]

    def refund(key: str, ident: int = ident) -> TestResponse:
        return client.post(f"/charges/{ident}/refunds", headers={"Idempotency-Key": key})

    # When it is refunded twice under one key, then both get the same answer
    first, again = refund("b"), refund("b")
    assert (first.status_code, again.status_code, first.data) == (201, 201, again.data)

    # And under another key, or the charge's, or for no charge, it is refused
    assert [refund("c").status_code, refund("a").status_code, refund("d", 77).status_code] == [422, 422, 404]
    assert [one["refunded"] for one in client.get("/charges").json or []] == [True]


def test_a_key_that_is_being_worked_at_is_a_conflict(
    charge: Callable[..., TestResponse], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a slow charge that is under way
    begun, go_on = Event(), Event()

    def pause(_seconds: float) -> None:
        begun.set()
        go_on.wait(10)

    monkeypatch.setattr(behaviour, "sleep", pause)
    thread = Thread(target=charge, args=("a", "ada+slow@example.org"))
    thread.start()
    assert begun.wait(10)

    # When its key comes again, then that has to wait; and afterwards it gets the answer
    try:
        assert charge("a", "ada+slow@example.org").status_code == 409
    finally:
        go_on.set()
        thread.join()
    assert charge("a", "ada+slow@example.org").status_code == 201


def test_a_timeout_comes_after_the_charge_and_only_at_the_first_attempt(
    client: FlaskClient, charge: Callable[..., TestResponse], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a service whose pauses are noted
    charged_before: list[int] = []
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        charged_before.append(len(client.get("/charges").json or []))

    monkeypatch.setattr(behaviour, "sleep", pause)

    # When a customer is charged twice under one key who times out
    answers = [charge("a", "ada+timeout@example.org") for _ in range(2)]

    # Then the first was charged, and had to wait for longer than our client does
    assert [answer.status_code for answer in answers] == [201, 201]
    assert charged_before == [1]
    assert pauses[0] * 1_000 > settings.PAYMENTS_TIMEOUT_MS


def test_a_charge_survives_that_the_service_is_killed(service: PaymentService) -> None:
    # Given a service that has charged and does not answer
    headers = {"Idempotency-Key": "a"}
    body = body_for("ada+timeout@example.org")

    def ask() -> httpx.Response:
        return httpx.post(f"{service.url}/charges", json=body, headers=headers, timeout=30)

    failed: list[httpx.TransportError] = []

    def fail() -> None:
        try:
            ask()
        except httpx.TransportError as error:
            failed.append(error)

    thread = Thread(target=fail)
    thread.start()
    eventually(service.charges)

    # When it is killed, and asked again after it has come back
    service.stop()
    thread.join()
    service.start()

    # Then it knows the charge
    assert len(failed) == 1
    assert ask().json()["id"] == service.charges()[0]["id"]
    assert len(service.charges()) == 1
