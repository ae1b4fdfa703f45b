"""What the business does, one file per aggregate; `dramatiq actors` performs all of it."""

from __future__ import annotations

from .broker import broker
from .orders import confirm_order, reserve_stock

__all__ = ["broker", "confirm_order", "reserve_stock"]
