"""What is in stock of each article."""

from __future__ import annotations

from peewee import SQL, IntegerField, Model, TextField

from .database import database


class Stock(Model):
    """The stock of one article.

    Columns:
      sku: the name of the article.
      quantity: how many pieces are there; the database refuses less than zero.
      price_cents: what one costs.
    """

    sku = TextField(primary_key=True)
    quantity = IntegerField()
    price_cents = IntegerField(constraints=[SQL("DEFAULT 1000")])

    class Meta:
        database = database
        table_name = "stock"
