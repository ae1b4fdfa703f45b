"""A little stock, to try the application with."""

from __future__ import annotations

from .stock import Stock

SAMPLE_SKUS = [f"SKU-{number}" for number in range(1, 11)]
SAMPLE_QUANTITY = 100_000


def load_sample_data() -> int:
    """Put SKU-1 to SKU-10 in stock, 100,000 pieces of each, where they are not known yet.

    An article that exists keeps its quantity, so it may be called again at any time, also while
    orders are being placed.

    Returns:
      How many of the ten articles were added.
    """
    rows = [{"sku": sku, "quantity": SAMPLE_QUANTITY} for sku in SAMPLE_SKUS]
    added = Stock.insert_many(rows).on_conflict_ignore().returning(Stock.sku).execute()
    return len(list(added))
