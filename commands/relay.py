"""`manage.py relay`: publish what is due, and find out what Redis has lost, until a signal comes."""

from __future__ import annotations

import logging

from middleware.__main__ import relay as run_relay


def relay() -> None:
    """Run a relay in this process; SIGTERM and SIGINT end it after the round it is in."""
    from actors import broker

    assert broker.ledger is not None
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] [%(name)s] [%(levelname)s] %(message)s")
    logging.getLogger("onetake").info("The relay is at work")
    run_relay(broker, broker.ledger)
