"""Finding a middleware of Dramatiq's in a broker's stack, wherever it stands and whenever it came."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.middleware import Middleware

M = TypeVar("M", bound="Middleware")


def find(broker: Broker, kind: type[M]) -> M | None:
    """The first middleware of this class in the broker's stack, or None."""
    known: Any = kind
    found: M | None = _find(broker, known, len(broker.middleware))
    return found


def find_all(broker: Broker, kind: type[M]) -> list[M]:
    """All middleware of this class in the broker's stack, in its order."""
    known: Any = kind
    found: list[M] = _find_all(broker, known, len(broker.middleware))
    return found


@lru_cache(maxsize=128)
def _find_all(broker: Any, kind: Any, _size: int) -> Any:
    return [m for m in broker.middleware if isinstance(m, kind)]


@lru_cache(maxsize=128)
def _find(broker: Any, kind: Any, _size: int) -> Any:
    return next((m for m in broker.middleware if isinstance(m, kind)), None)
