"""What the business does, one file per aggregate; `dramatiq actors` performs all of it."""

from __future__ import annotations

from .broker import broker
from .fulfilment import fulfil
from .notifications import notify_customer
from .orders import release_stock, reserve_stock
from .payments import ChargeRefusedError, charge, refund
from .reports import daily_report
from .shipments import UndeliverableError, ship

__all__ = [
    "ChargeRefusedError",
    "UndeliverableError",
    "broker",
    "charge",
    "daily_report",
    "fulfil",
    "notify_customer",
    "refund",
    "release_stock",
    "reserve_stock",
    "ship",
]
