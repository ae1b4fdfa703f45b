"""Scenes that need a process patched by gevent.

`python -m tests.gevent_scenes SCENE` plays one on the servers of the environment and prints what
it saw as JSON.
"""

# ruff: noqa: E402 - nothing may be imported before it is patched
from gevent import monkey

monkey.patch_all()

import json
import logging
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import gevent
import peewee
import psycopg2.extensions

from middleware import Database
from middleware.errors import ConfigurationError

from .processes import eventually
from .stage import Stage

WAITS = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
SLEEPS = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
TICK_S = 0.01


class Ticker:
    """Counts hundredths of a second as long as nobody stalls the process."""

    def __init__(self) -> None:
        self.ticks = 0
        self._greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        while True:
            gevent.sleep(TICK_S)
            self.ticks += 1


def one_key(stage: Stage) -> Any:
    """Two greenlets perform one message; the second waits for the key while the first works."""
    ticker = Ticker()
    ticks: list[int] = []

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)
        eventually(lambda: stage.sql(WAITS))
        before = ticker.ticks
        gevent.sleep(50 * TICK_S)
        ticks.append(ticker.ticks - before)

    message = write.message("a")
    for _ in range(2):
        stage.broker.enqueue(message)
    with stage.worker(threads=2):
        stage.expect_in_redis()
    return {"ticks": ticks, "effects": stage.effects(), "keys": len(stage.key_rows())}


def long_statement(stage: Stage) -> Any:
    """A statement takes long, in one of two greenlets."""
    ticker = Ticker()
    ticks: list[int] = []

    @stage.actor()
    def write(label: str) -> None:
        before = ticker.ticks
        stage.database.execute_sql("SELECT pg_sleep(0.5)")
        ticks.append(ticker.ticks - before)
        stage.effect(label)

    with stage.worker(threads=2):
        write.send("a")
        stage.expect_in_redis()
    return {"ticks": ticks, "effects": stage.effects()}


def time_limit(stage: Stage) -> Any:
    """The time limit interrupts a computing body, and one that waits in a statement."""

    @stage.actor(time_limit=100)
    def dawdle(statement: str) -> None:
        stage.effect("dawdle")
        while True:
            stage.database.execute_sql(statement)
            gevent.sleep(TICK_S)

    @stage.actor()
    def write(label: str) -> None:
        stage.effect(label)

    with stage.worker(threads=1, time_limits=True):
        messages = [dawdle.send("SELECT 1"), dawdle.send("SELECT pg_sleep(60)")]
        stage.expect_in_redis(delayed=messages)
        write.send("a")
        stage.expect_in_redis(delayed=messages)
        eventually(stage.effects)
    # The interrupt closed a connection, and the server looks for its client now and then (T6).
    eventually(lambda: not stage.sql(SLEEPS))
    return {
        "effects": stage.effects(),
        "keys": [consumer for consumer, _ in stage.key_rows()],
        "retries": [message.options["retries"] for message in stage.messages("delayed")],
        "raised": [type(seen.outcome).__name__ for seen in stage.seen("raised")],
    }


def shutdown(stage: Stage) -> Any:
    """The worker is told to stop while a body that wants to hear of it waits in a statement."""

    @stage.actor(max_retries=0, notify_shutdown=True)
    def write(labels: list[str]) -> None:
        stage.effect(labels.pop())
        stage.database.execute_sql("SELECT pg_sleep(60)")

    write.send(["a"])
    sent = stage.raw("waiting")
    with stage.worker(threads=1):
        eventually(lambda: stage.sql(SLEEPS))
    return {"as it was": stage.raw("waiting") == sent, "effects": stage.effects(), "keys": stage.key_rows()}


def black_hole(_stage: Stage) -> Any:
    """A server accepts the connection and never says a word."""
    ticker = Ticker()
    with socket.create_server(("127.0.0.1", 0)) as hole:
        database = Database(
            f"postgresql://postgres@127.0.0.1:{hole.getsockname()[1]}/postgres", connect_timeout_s=1
        )
        try:
            with gevent.Timeout(20):
                database.connect()
        except peewee.OperationalError as error:
            return {"error": str(error), "ticks": ticker.ticks}
    return {"error": None, "ticks": ticker.ticks}


def callback_removed(stage: Stage) -> Any:
    """Somebody took the wait callback away before the worker boots."""
    psycopg2.extensions.set_wait_callback(None)
    try:
        with stage.worker():
            return {"error": None}
    except ConfigurationError as error:
        return {"error": str(error)}


SCENES = {
    scene.__name__: scene
    for scene in (one_key, long_statement, time_limit, shutdown, black_hole, callback_removed)
}


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    servers: Any = SimpleNamespace(
        postgres=SimpleNamespace(url=os.environ["DATABASE_URL"]),
        redis=SimpleNamespace(url=os.environ["REDIS_URL"]),
    )
    seen = SCENES[sys.argv[1]](Stage(servers))
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
