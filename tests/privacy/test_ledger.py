"""The ledger pays each step once, finds damage and refuses misuse."""

import shutil
import stat

import numpy as np
import pytest

from tfdpsq.privacy.proof.ledger import Ledger, read_ledger
from tfdpsq.validation import DataError, InputError

PLAN, DATA = "ab" * 32, "keyed:" + "cd" * 32


def _open(path, plan=PLAN, data=DATA, steps=10, **options):
    return Ledger(path, plan, data, steps, **options)


@pytest.fixture
def paid(tmp_path):
    """A closed ledger of ten steps, four of them paid."""
    path = tmp_path / "ledger.jsonl"
    with _open(path) as ledger:
        for step in range(4):
            ledger.pay(step)
    return path


def test_steps_are_paid_in_order_each_once(tmp_path):
    with _open(tmp_path / "ledger.jsonl", steps=3) as ledger:
        assert ledger.steps_paid == 0
        run = ledger.run
        for step in range(3):
            assert ledger.pay(step) is True
            assert ledger.pay(step) is False  # A replay.
            assert ledger.pay(np.int64(0)) is False
            assert ledger.steps_paid == step + 1
            assert ledger.run == run  # one run, one name
    with _open(tmp_path / "ledger.jsonl", steps=3) as ledger:
        assert (ledger.steps_paid, ledger.run) == (3, run)
        assert [ledger.pay(step) for step in range(3)] == [False] * 3
    assert stat.S_IMODE((tmp_path / "ledger.jsonl").stat().st_mode) == 0o600


def test_ledger_without_paid_steps_begins_again_as_another_run(tmp_path):
    """Copied after a kill before step 0, two runs had one name and counted once."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    _open(first).close()
    shutil.copy(first, copy)
    runs = set()
    # The plan, too, may be corrected while nothing is paid.
    for path, plan, steps in ((first, PLAN, 10), (copy, "x", 3)):
        with _open(path, plan, steps=steps) as ledger:
            runs.add(ledger.run)
            assert (ledger.steps_paid, ledger.steps_allowed) == (0, steps)
            assert ledger.pay(0)
    assert len(runs) == 2
    with _open(copy, "x", steps=3) as ledger:  # now it goes on
        assert ledger.steps_paid == 1
    assert {path.name for path in tmp_path.iterdir()} == {"first", "copy"}


def test_state_newer_than_its_ledger_is_refused(paid):
    """A backup of the ledger was restored: the lines of steps that ran are missing."""
    before = paid.read_bytes()
    header = before.splitlines(keepends=True)[0]
    for content, taken in ((before, 5), (header, 1)):
        paid.write_bytes(content)
        with pytest.raises(DataError, match="Lines of the ledger were lost"):
            _open(paid, steps_taken=taken)
        assert paid.read_bytes() == content


@pytest.mark.parametrize("step", [-1, 5])
def test_step_that_is_not_the_next_one_is_refused(paid, step):
    with (
        _open(paid) as ledger,
        pytest.raises(InputError, match=f"step {step} is not the next"),
    ):
        ledger.pay(step)
    assert read_ledger(paid).steps_paid == 4


def test_overspending_is_refused(tmp_path):
    with _open(tmp_path / "ledger.jsonl", steps=2) as ledger:
        assert ledger.pay(0) and ledger.pay(1)
        for step in (2, 3, 10**9):
            with pytest.raises(InputError, match=f"step {step} would overspend"):
                ledger.pay(step)
        assert ledger.steps_paid == 2
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 2


def test_torn_line_of_any_length_is_cut_off_and_paid_again(paid, caplog):
    whole = paid.read_bytes()
    before = whole[: whole[:-1].rindex(b"\n") + 1]
    line = whole[len(before) :]
    for length in range(1, len(line), 5):
        paid.write_bytes(before + line[:length])
        assert read_ledger(paid).steps_paid == 3
        assert len(paid.read_bytes()) == len(before) + length  # Only looked at.
        caplog.clear()
        with _open(paid) as ledger:
            assert ledger.steps_paid == 3
            assert f"{length} bytes" in caplog.text
            assert paid.read_bytes() == before
            assert ledger.pay(3) is True
        assert paid.read_bytes() == whole


def test_damaged_bytes_and_lost_lines_are_found_and_not_repaired(paid):
    """No flipped byte of a whole line makes it say less than it did of the same run."""
    whole = paid.read_bytes()
    lines, said = whole.splitlines(keepends=True), read_ledger(paid)
    for place in range(len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 7
        paid.write_bytes(changed)
        try:
            found = read_ledger(paid)
        except DataError as error:
            assert error.line == 1 + whole[:place].count(b"\n")
            continue
        # A letter of the header: of another plan, data or run.
        assert found.steps_paid == said.steps_paid
        names = ("plan", "data", "steps_allowed", "run")
        assert any(getattr(found, n) != getattr(said, n) for n in names)
    for damaged in (
        whole + b"\0\n",
        b"".join(lines[:2] + lines[3:]),
        b"".join([*lines[:2], *lines[1:]]),
        b"".join(lines[1:]),
        b"text\n",
        b"[]\n",
    ):
        paid.write_bytes(damaged)
        for use in (read_ledger, _open):
            with pytest.raises(DataError, match="Restore"):
                use(paid)
        assert paid.read_bytes() == damaged


def test_ledger_whose_process_died_before_its_first_line_pays_for_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for torn in (b"", b'{"data": "cd'):
        path.write_bytes(torn)
        assert read_ledger(path).steps_paid == 0
        with _open(path) as ledger:
            assert ledger.steps_paid == 0 and ledger.pay(0)


def test_ledger_of_another_version_and_no_ledger_are_named(tmp_path, paid):
    paid.write_text(paid.read_text().replace("ledger/2", "ledger/1", 1))
    with pytest.raises(DataError, match="not the header of a tfdpsq-ledger/2"):
        _open(paid)
    with pytest.raises(DataError, match="nowhere"):
        read_ledger(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"plan": "cd" * 32}, "the plan changed"),
        ({"data": "x"}, "the private data changed, and 4 steps are paid"),
        ({"steps": 11}, "the number of steps changed"),
    ],
)
def test_paid_ledger_is_of_one_plan_and_data(paid, changed, message):
    before = paid.read_bytes()
    with pytest.raises(InputError, match=message) as raised:
        _open(paid, **changed)
    assert DATA not in str(raised.value)
    assert paid.read_bytes() == before
    _open(paid).close()  # And the lock of the refused one is gone.


def test_run_without_privacy_begins_its_ledger_again(paid):
    with _open(paid, repeats=True) as ledger:
        assert ledger.steps_paid == 0


def test_two_never_share_a_ledger(paid):
    with _open(paid) as ledger:
        with pytest.raises(InputError, match="another process uses it. Wait"):
            _open(paid)
        assert read_ledger(paid).run == ledger.run  # Looking needs no lock.
    with _open(paid) as ledger:
        assert ledger.pay(4)
    with pytest.raises(InputError, match="cannot be written"):
        ledger.pay(5)  # closed
    ledger.close()  # Again, to no effect.
