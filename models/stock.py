"""What is in stock of each article."""

from __future__ import annotations

from peewee import IntegerField, Model, TextField

from .database import database


class Stock(Model):
    """The stock of one article.

    Columns:
      sku: the name of the article.
      quantity: how many pieces are there; the database refuses less than zero.
    """

    sku = TextField(primary_key=True)
    quantity = IntegerField()

    class Meta:
        database = database
        table_name = "stock"
