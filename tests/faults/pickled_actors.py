"""The actors under test in a worker that speaks pickle."""

from __future__ import annotations

import dramatiq
from dramatiq.encoder import PickleEncoder

dramatiq.set_encoder(PickleEncoder())

from .actors import broker  # noqa: E402 - declared with the encoder in place

__all__ = ["broker"]
