"""Under gevent no delivery stalls the process, and every end is the same (T7)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from .servers import PROJECT, Servers

#: Half a second has fifty ticks; a process that stalls has next to none.
ENOUGH_TICKS = 15


@pytest.fixture
def play(clean: Servers) -> Any:
    """Plays a scene in a process of its own and returns what it saw."""

    def play(scene: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "tests.gevent_scenes", scene],
            cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return play


def test_two_greenlets_with_one_key_do_not_stall_the_process_i1_t7(play: Any) -> None:
    # Given two deliveries of one message, when the second waits for the key of the first
    seen = play("one_key")
    # Then the process went on meanwhile, and one took effect
    assert [count > ENOUGH_TICKS for count in seen["ticks"]] == [True]
    assert (seen["effects"], seen["keys"]) == (["a"], 1)


def test_a_long_statement_does_not_stall_the_process_t7(play: Any) -> None:
    # Given a body with a long statement, when it runs
    seen = play("long_statement")
    # Then the process went on meanwhile
    assert seen["effects"] == ["a"]
    assert [count > ENOUGH_TICKS for count in seen["ticks"]] == [True]


def test_a_time_limit_is_an_exception_and_the_greenlet_goes_on_clean_i8_t7(play: Any) -> None:
    # Given bodies that run into their time limit, one of them inside a statement
    seen = play("time_limit")
    # Then each spent a retry, though the interrupt closed a connection; the next message is clean,
    # and PostgreSQL has stopped the statement whose client was gone (T6)
    assert seen["raised"] == ["TimeLimitExceeded", "TimeLimitExceeded"]
    assert seen["retries"] == [1, 1]
    assert (seen["effects"], seen["keys"]) == (["a"], ["write"])


def test_a_body_that_hears_of_a_shutdown_is_given_back_t7(play: Any) -> None:
    # Given a body inside a statement, when its worker is told to stop
    seen = play("shutdown")
    # Then nothing is stored, and the message is in its queue as it was
    assert seen == {"as it was": True, "effects": [], "keys": []}


def test_a_connect_that_nobody_answers_ends_after_its_timeout_t7(play: Any) -> None:
    # Given an address that accepts and never answers, when a greenlet connects to it
    seen = play("black_hole")
    # Then it gives up, and the process went on meanwhile
    assert "connect_timeout" in seen["error"]
    assert seen["ticks"] > ENOUGH_TICKS


def test_a_patched_worker_without_wait_callback_does_not_boot_t7(play: Any) -> None:
    # Given a process whose callback was removed, when its worker boots
    seen = play("callback_removed")
    # Then it says what to remove
    assert "set_wait_callback(None)" in seen["error"]
