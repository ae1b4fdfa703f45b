"""A payment service for the shop to talk to: `gunicorn payments:app`.

It stands for a provider: a process of its own that knows nothing of the shop, takes an Idempotency-Key, and
misbehaves as customers ask for (see `behaviour`).
"""

from __future__ import annotations

from pathlib import Path

from flask import Flask, Response, jsonify
from werkzeug.exceptions import HTTPException

import settings

from .charges import charges
from .store import Store


def create_app(file: Path) -> Flask:
    """A Flask application whose charges are in an SQLite file; it makes the file when it has to."""
    app = Flask(__name__)
    app.extensions["store"] = Store(file)
    app.register_blueprint(charges)
    app.register_error_handler(HTTPException, _answer_in_json)
    return app


def _answer_in_json(error: HTTPException) -> tuple[Response, int]:
    return jsonify(error=error.description), error.code or 500


app = create_app(Path(settings.__file__).parent / settings.PAYMENTS_FILE)
