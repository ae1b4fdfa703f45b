"""What is stored: one file per aggregate, and the numbered migrations that make the tables."""

from __future__ import annotations

from .database import database
from .migration import migrate
from .order import Order, OrderState
from .processed_message import ProcessedMessage
from .sample_data import load_sample_data
from .stock import Stock

__all__ = [
    "Order",
    "OrderState",
    "ProcessedMessage",
    "Stock",
    "database",
    "load_sample_data",
    "migrate",
]
