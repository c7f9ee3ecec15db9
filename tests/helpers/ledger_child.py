"""A training process reduced to its order of events, for tests that kill it.

    python ledger_child.py train LEDGER UPDATES STEPS [DIE]
    python ledger_child.py read READS NAME

`train` pays for each step, then makes its update: a line in the file UPDATES, which
stands for weights and checkpoint. It goes on from the updates that are there. After
each payment it says so on its standard output. DIE is "paid:7" or "updated:7": kill
yourself (-9) right after that. `read` records private reads, its own and some that
others record too.
"""

import os
import pathlib
import signal
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
# The package's own `__init__` imports TensorFlow, which the ledger does not need and
# a process that is to be killed thirty times should not wait for.
_package = types.ModuleType("tfdpsq.privacy")
_package.__path__ = [str(ROOT / "tfdpsq" / "privacy")]
sys.modules["tfdpsq.privacy"] = _package

from tfdpsq.privacy.proof.ledger import Ledger, PrivateReads  # noqa: E402

PLAN, DATA = "plan " * 10, "data " * 10


def train(ledger_path, updates_path, steps, die=""):
    """Pays for and updates what is left of `steps`."""
    ledger = Ledger(ledger_path, PLAN, DATA, int(steps))
    updates = os.open(updates_path, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    done = os.read(updates, 1 << 24).count(b"\n")

    def pay(step):
        word = "paid" if ledger.pay(step) else "replayed"
        os.write(1, f"{word} {step}\n".encode())
        _die_at(die, f"paid:{step}")

    def update(step):
        os.write(updates, f"{step}\n".encode())
        os.fsync(updates)
        _die_at(die, f"updated:{step}")

    for step in range(done, int(steps)):
        pay(step)
        update(step)


def read(path, name):
    """Records fifteen reads of its own and fifteen that everyone records."""
    reads = PrivateReads(path)
    for number in range(15):
        reads.record(f"read {number}", "everyone")
        reads.record(f"read {number}", name)


def _die_at(die, event):
    if die == event:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    {"train": train, "read": read}[sys.argv[1]](*sys.argv[2:])
