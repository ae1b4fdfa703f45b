"""The web application: `gunicorn web:app`."""

from __future__ import annotations

from flask import Flask, Response, jsonify
from werkzeug.exceptions import HTTPException

from models import database

from .orders import orders


def create_app() -> Flask:
    """A Flask application with the orders API; it connects to nothing before its first request."""
    app = Flask(__name__)
    app.register_blueprint(orders)
    app.register_error_handler(HTTPException, _answer_in_json)
    app.teardown_appcontext(_close_connection)
    return app


def _answer_in_json(error: HTTPException) -> tuple[Response, int]:
    return jsonify(error=error.description), error.code or 500


def _close_connection(_error: BaseException | None) -> None:
    if not database.is_closed():
        database.close()


app = create_app()
