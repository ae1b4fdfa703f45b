"""What is stored: one file per aggregate, and the numbered migrations that make the tables."""

from __future__ import annotations

from .barrier import Barrier, BarrierMember
from .daily_report import DailyReport
from .database import database
from .dead_letter import DeadLetter
from .migration import migrate
from .notification import Notification
from .order import Order, OrderState
from .outbox_message import OutboxMessage
from .processed_message import ProcessedMessage
from .sample_data import load_sample_data
from .shipment import Shipment
from .stock import Stock
from .tick import Tick

__all__ = [
    "Barrier",
    "BarrierMember",
    "DailyReport",
    "DeadLetter",
    "Notification",
    "Order",
    "OrderState",
    "OutboxMessage",
    "ProcessedMessage",
    "Shipment",
    "Stock",
    "Tick",
    "database",
    "load_sample_data",
    "migrate",
]
