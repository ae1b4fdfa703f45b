"""Ids that are derived, so that whoever derives them again derives the same (T24)."""

from __future__ import annotations

from uuid import UUID, uuid5

#: Ours, in the sense of RFC 9562, section 5.5.
NAMESPACE = UUID("6f6e6574-616b-5065-8d65-737361676573")


def derived_id(*parts: object) -> str:
    """An id that is the same for the same parts: a name-based UUID (RFC 9562, version 5)."""
    return str(uuid5(NAMESPACE, "\0".join(map(str, parts))))
