"""The same message sent again after it died is a message of its own: one more chain, one more end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .processes import eventually

if TYPE_CHECKING:
    from .ledger_stage import LedgerStage

pytest_plugins = ("tests.ledger_stage",)


@pytest.mark.parametrize("inside", [True, False], ids=["inside a transaction", "outside"])
def test_a_message_that_is_sent_again_after_it_died_dies_again_and_is_not_owed_t29(
    ledger: LedgerStage, inside: bool
) -> None:
    # Given a message that failed for good
    runs: list[int] = []

    @ledger.actor(max_retries=0)
    def fails() -> None:
        runs.append(1)
        raise ValueError

    message = fails.message()
    with ledger.worker_and_relay():
        ledger.send(message)
        eventually(lambda: len(ledger.letters()) == 1)

        # When its sender sends it again
        if inside:
            ledger.send(message)
        else:
            ledger.broker.enqueue(message)

        # Then it is performed once more, and ends
        eventually(lambda: len(ledger.letters()) == 2, what=ledger.rows)
        ledger.expect_settled()
    assert len(runs) == 2
