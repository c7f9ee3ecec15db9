"""`kill -9` at any moment: the ledger never forgets a step that took effect."""

import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from tfdpsq.privacy.proof.ledger import Ledger, read_ledger

_CHILD = pathlib.Path(__file__).parents[1] / "helpers/ledger_child.py"
PLAN, DATA = "plan " * 10, "data " * 10  # As in the child.


def _start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(_CHILD), *map(str, arguments)],
        stdout=subprocess.PIPE,
        bufsize=0,  # what is read ahead would be missing from communicate()
        stderr=subprocess.PIPE,
    )


def _run(*arguments):
    """Runs a child to its end; returns its reports and whether it was killed."""
    child = _start(*arguments)
    out, error = child.communicate(timeout=120)
    assert child.returncode in (0, -9), error.decode()
    return _reports(out), child.returncode == -9


def _reports(out):
    """What a child said: {"paid": [steps], "replayed": [steps]}."""
    said = {"paid": [], "replayed": []}
    for line in out.decode().splitlines():
        word, step = line.split()
        said[word].append(int(step))
    return said


def _updates(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line) for line in lines]


def test_run_killed_again_and_again_pays_every_step_once(tmp_path):
    random = np.random.default_rng(7)
    ledger, updates, steps = tmp_path / "ledger.jsonl", tmp_path / "updates", 10**6
    paid, replayed = [], []
    for life in range(8):
        child = _start("train", ledger, updates, steps)
        head = b""
        if life % 4:
            head = b"".join(child.stdout.readline() for _ in range(3 * life))
            time.sleep(random.uniform(0, 0.003))
        else:  # Killed anywhere, most likely while it starts or opens the ledger.
            time.sleep(random.uniform(0, 0.15))
        if head:  # Nobody else gets the ledger, until its process is dead.
            with pytest.raises(ValueError, match="another process uses it"):
                Ledger(ledger, PLAN, DATA, steps)
        child.kill()
        out, error = child.communicate(timeout=60)
        assert child.returncode == -9, error.decode()
        said = _reports(head + out)
        paid += said["paid"]
        replayed += said["replayed"]
        if not ledger.exists():
            assert paid == [] and _updates(updates) == []
            continue
        found = read_ledger(ledger)  # Raises if a line is damaged.
        # What was reported as paid is there, and so is what took effect.
        assert set(paid) | set(replayed) <= set(range(found.steps_paid))
        done = len(_updates(updates))
        assert _updates(updates) == list(range(done))
        # A step that is paid and has no effect yet can only be the last one.
        assert done <= found.steps_paid <= done + 1

    last = len(_updates(updates)) + 10
    said, _ = _run("train", ledger, updates, steps, f"updated:{last - 1}")
    paid += said["paid"]
    replayed += said["replayed"]
    assert _updates(updates) == list(range(last))
    assert read_ledger(ledger).steps_paid == last > 50
    # None was newly paid twice, and none is missing but where the kill came between
    # the payment and its report: such a step was replayed.
    assert len(set(paid)) == len(paid)
    assert set(range(last)) - set(paid) <= set(replayed)
    assert len(ledger.read_bytes().splitlines()) == 1 + last  # header, steps


@pytest.mark.parametrize(
    "die, paid, updated, then",
    [
        # Between payment and update: the step has no effect and is paid. Its replay
        # costs nothing.
        ("paid:3", 4, 3, {"paid": [4, 5], "replayed": [3]}),
        ("updated:3", 4, 4, {"paid": [4, 5], "replayed": []}),
        ("paid:5", 6, 5, {"paid": [], "replayed": [5]}),
    ],
)
def test_step_killed_after_its_payment_is_replayed_unpaid(
    tmp_path, die, paid, updated, then
):
    ledger, updates = tmp_path / "ledger.jsonl", tmp_path / "updates"
    assert _run("train", ledger, updates, 6, die)[1]
    assert read_ledger(ledger).steps_paid == paid
    assert _updates(updates) == list(range(updated))

    assert _run("train", ledger, updates, 6) == (then, False)
    assert read_ledger(ledger).steps_paid == 6
    assert _updates(updates) == list(range(6))
