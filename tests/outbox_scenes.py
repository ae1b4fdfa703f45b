"""A scene of many senders at once, for threads and for greenlets.

`python -m tests.outbox_scenes` plays it under gevent, on the servers of the environment, and prints
what it saw as JSON.
"""

if __name__ == "__main__":  # nothing may be imported before it is patched
    from gevent import monkey

    monkey.patch_all()

import json
import os
import sys
from contextlib import suppress
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

from .ledger_stage import LedgerStage

SENDERS = 8


class ChangeOfMindError(Exception):
    """The application rolls its transaction back."""


def side_by_side(ledger: LedgerStage) -> dict[str, Any]:
    """Half of the senders commit, half roll back, all at once; one sends outside meanwhile.

    Returns:
      What was in Redis while all transactions were open, what was owed afterwards, and the effects.
    """
    all_sent, looked = Barrier(SENDERS + 1), Barrier(SENDERS + 1)

    @ledger.actor()
    def write(label: str) -> None:
        raise NotImplementedError(label)

    def send(number: int) -> None:
        with suppress(ChangeOfMindError), ledger.database.atomic():
            ledger.effect(str(number))
            write.send(str(number))
            all_sent.wait(20)
            looked.wait(20)
            if number % 2:
                raise ChangeOfMindError
        ledger.database.close()

    threads = [Thread(target=send, args=(number,)) for number in range(SENDERS)]
    for thread in threads:
        thread.start()
    all_sent.wait(20)
    outside = write.send("outside")
    meanwhile = ledger.in_redis() == [outside.message_id], ledger.owed(), ledger.effects()
    looked.wait(20)
    for thread in threads:
        thread.join()
    return {
        "meanwhile": list(meanwhile),
        "owed": sorted(row.message.args[0] for row in ledger.rows()),
        "effects": ledger.effects(),
    }


def main() -> None:
    servers: Any = SimpleNamespace(
        postgres=SimpleNamespace(url=os.environ["DATABASE_URL"]),
        redis=SimpleNamespace(url=os.environ["REDIS_URL"]),
    )
    ledger = LedgerStage(servers)
    sys.stdout.write(json.dumps(side_by_side(ledger)))
    ledger.close()


if __name__ == "__main__":
    main()
