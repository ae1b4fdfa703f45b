"""What the business does, one file per aggregate; `dramatiq actors` performs all of it."""

from __future__ import annotations

from .broker import broker
from .orders import reserve_stock

__all__ = ["broker", "reserve_stock"]
