"""The actors under test in a worker whose clock is wrong by CLOCK_SKEW_S seconds."""

from __future__ import annotations

import os
import time

_right = time.time
_skew_s = float(os.environ["CLOCK_SKEW_S"])
time.time = lambda: _right() + _skew_s

from .actors import broker  # noqa: E402 - what it imports must see the wrong clock

__all__ = ["broker"]
