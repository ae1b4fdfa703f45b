"""Idempotent message processing on Dramatiq, Redis, PostgreSQL and peewee."""

from . import errors, tables
from .broker import DurableRedisBroker
from .database import Database
from .idempotent import IdempotentConsumer
from .outside import idempotency_key

__all__ = ["Database", "DurableRedisBroker", "IdempotentConsumer", "errors", "idempotency_key", "tables"]
