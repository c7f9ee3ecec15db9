"""The ledger pays each step once, finds every damage and refuses every misuse."""

import hashlib
import json
import shutil
import stat

import numpy as np
import pytest

from tfdpsq.privacy.proof.ledger import Ledger, read_ledger
from tfdpsq.validation import DataError, InputError

PLAN, DATA = "ab" * 32, "keyed:" + "cd" * 32


def _open(path, plan=PLAN, data=DATA, steps=10):
    return Ledger.open(path, plan, data, steps)


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
        heads = [ledger.head]
        for step in range(3):
            assert ledger.pay(step) is True
            assert ledger.pay(step) is False  # A replay.
            assert ledger.pay(np.int64(0)) is False
            assert ledger.steps_paid == step + 1
            heads.append(ledger.head)
    assert len(set(heads)) == 4
    with _open(tmp_path / "ledger.jsonl", steps=3) as ledger:
        assert (ledger.steps_paid, ledger.head) == (3, heads[-1])
        assert ledger.first_chain == heads[0]
        assert [ledger.pay(step) for step in range(3)] == [False] * 3


def test_the_file_is_the_chain_it_is_documented_to_be(paid):
    """Recomputed here from the documented format alone."""
    chain = ""
    lines = paid.read_text().splitlines()
    for number, text in enumerate(lines):
        held = json.loads(text)
        stated = held.pop("chain")
        if number:
            assert held == {"step": number - 1}
        else:
            assert len(bytes.fromhex(held.pop("nonce"))) == 32
            assert held == {
                "format": "tfdpsq-ledger/1",
                "plan": PLAN,
                "data": DATA,
                "steps": 10,
            }
            held["nonce"] = json.loads(text)["nonce"]
        content = json.dumps(held, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256((chain + content).encode()).hexdigest()
        assert stated == chain
    assert len(lines) == 5
    summary = read_ledger(paid)
    assert (summary.plan, summary.data) == (PLAN, DATA)
    assert (summary.steps_allowed, summary.steps_paid) == (10, 4)
    with _open(paid) as ledger:
        assert ledger.summary == summary and ledger.path == paid
        assert (ledger.steps_allowed, ledger.steps_paid) == (10, 4)
    assert summary.head == chain


def test_the_head_tells_nothing_of_the_data(tmp_path):
    """Were it a function of the data alone, guesses at them could be tested on it."""
    with _open(tmp_path / "a") as first, _open(tmp_path / "b") as second:
        assert first.head != second.head
        nonces = {
            json.loads((tmp_path / name).read_text())["nonce"] for name in ("a", "b")
        }
        assert len(nonces) == 2
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_ledger_without_paid_steps_is_begun_again_and_no_copy_has_its_head(tmp_path):
    """Copied after a kill before step 0, two runs had one head and counted once."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    _open(first).close()
    shutil.copy(first, copy)
    heads = set()
    # The plan, too, may be corrected while nothing is paid.
    for path, plan, steps in ((first, PLAN, 10), (copy, PLAN, 10), (copy, "x", 3)):
        with _open(path, plan, steps=steps) as ledger:
            heads.add(ledger.head)
            assert (ledger.steps_paid, ledger.steps_allowed) == (0, steps)
            with pytest.raises(InputError, match="another process uses it"):
                _open(path, plan, steps=steps)
            assert ledger.pay(0)
            paid = path.read_bytes()
        if path is copy and steps == 10:
            _open(first.with_name("third")).close()
            first.with_name("third").replace(copy)
    assert len(heads) == 3
    with _open(copy, "x", steps=3) as ledger:  # now it goes on
        assert ledger.steps_paid == 1 and copy.read_bytes() == paid
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"first", "copy"}


def test_a_ledger_behind_a_saved_state_is_damaged_and_kept(paid):
    before = paid.read_bytes()
    header = before.splitlines(keepends=True)[0]
    for content, taken in ((before, 5), (header, 1)):
        paid.write_bytes(content)
        with pytest.raises(DataError, match="Lines of the ledger were lost"):
            Ledger.open(paid, PLAN, DATA, 10, taken)
        assert paid.read_bytes() == content


@pytest.mark.parametrize("step", [4, 5, 9])
def test_a_gap_is_refused(paid, step):
    with _open(paid) as ledger:
        if step == 4:
            assert ledger.pay(4)
            step = 6
        with pytest.raises(InputError, match=f"step {step} comes after a gap"):
            ledger.pay(step)


def test_overspending_is_refused(tmp_path):
    with _open(tmp_path / "ledger.jsonl", steps=2) as ledger:
        with pytest.raises(InputError, match="step 2 would overspend: the plan has 2"):
            ledger.pay(2)
        assert ledger.pay(0) and ledger.pay(1)
        for step in (2, 3, 10**9):
            with pytest.raises(InputError, match=f"ledger.*step {step} would overspe"):
                ledger.pay(step)
        assert ledger.steps_paid == 2
    assert read_ledger(tmp_path / "ledger.jsonl").steps_paid == 2


@pytest.mark.parametrize("step", [-1, 1.0, True, None, "1", float("nan")])
def test_what_is_no_step_is_refused(paid, step):
    with _open(paid) as ledger, pytest.raises(InputError, match="step is"):
        ledger.pay(step)


def test_a_torn_line_of_any_length_is_cut_off_and_paid_again(paid, caplog):
    whole = paid.read_bytes()
    before = whole[: whole[:-1].rindex(b"\n") + 1]
    line = whole[len(before) :]
    for length in range(1, len(line)):
        paid.write_bytes(before + line[:length])
        assert read_ledger(paid).steps_paid == 3
        assert len(paid.read_bytes()) == len(before) + length  # Only looked at.
        caplog.clear()
        with _open(paid) as ledger:
            assert ledger.steps_paid == 3
            assert f"cut off {length} bytes" in caplog.text
            assert paid.read_bytes() == before
            assert ledger.pay(3) is True
        assert paid.read_bytes() == whole


def test_a_last_line_without_newline_that_could_not_be_the_next_is_damage(paid):
    """Its newline lost and a byte changed, a paid step is not taken for a torn one."""
    whole = paid.read_bytes()
    for damaged in (
        whole[:-1] + b"x",
        whole[:-9] + b"!",
        whole + b"\0",
        whole + b'{"step":9',
    ):
        paid.write_bytes(damaged)
        with pytest.raises(DataError, match="does not follow from the lines before"):
            _open(paid)


def test_a_flipped_bit_anywhere_is_found_with_its_line(paid):
    whole = paid.read_bytes()
    for place in range(len(whole)):
        line = 1 + whole[:place].count(b"\n")
        for bit in range(8) if place % 16 == 0 else (place % 8,):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            paid.write_bytes(changed)
            with pytest.raises(DataError, match="ledger.jsonl:") as raised:
                read_ledger(paid)
            assert raised.value.line == line, (place, bit)
        if place % 16 == 0:  # Opening flushes, which takes a while.
            with pytest.raises(DataError):
                _open(paid)
            assert paid.read_bytes() == changed  # Damage is not repaired away.


@pytest.mark.parametrize(
    "order, line",
    [
        ([0, 2, 3, 4], 2),
        ([0, 1, 3, 4], 3),
        ([0, 1, 1, 2, 3, 4], 3),
        ([0, 1, 2, 3, 4, 4], 6),
        ([0, 1, 3, 2, 4], 3),
        ([0, 4, 1, 2, 3], 2),
        ([0, 0, 1, 2, 3, 4], 2),
        ([1, 0, 2, 3, 4], 1),
        ([1, 2, 3, 4], 1),
        ([], 1),
    ],
)
def test_lines_removed_repeated_or_moved_are_found(paid, order, line):
    lines = paid.read_bytes().splitlines(keepends=True)
    paid.write_bytes(b"".join(lines[number] for number in order))
    for use in (read_ledger, _open):
        with pytest.raises(DataError, match="Restore the ledger from a backup") as held:
            use(paid)
        assert held.value.line == line


def test_lines_cut_off_the_end_show_in_the_head(paid):
    head = read_ledger(paid).head
    lines = paid.read_bytes().splitlines(keepends=True)
    paid.write_bytes(b"".join(lines[:-1]))
    found = read_ledger(paid)
    assert found.steps_paid == 3 and found.head != head
    assert found.head == json.loads(lines[-2])["chain"]


@pytest.mark.parametrize(
    "change", [{"steps": 11}, {"plan": "x"}, {"data": "x"}, {"nonce": "0" * 64}]
)
def test_a_header_rewritten_with_a_chain_of_its_own_is_found(paid, change):
    """The steps below it were chained to the old one."""
    first, *others = paid.read_bytes().splitlines(keepends=True)
    header = {**json.loads(first), **change}
    del header["chain"]
    content = json.dumps(header, sort_keys=True, separators=(",", ":"))
    header["chain"] = hashlib.sha256(content.encode()).hexdigest()
    forged = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    paid.write_bytes(forged + b"\n" + b"".join(others))
    with pytest.raises(DataError, match="ledger.jsonl:2: .*does not follow"):
        _open(paid)


def test_more_lines_than_steps_are_damage(tmp_path):
    """Written by a ledger of more steps, under a forged header of fewer."""
    path, chain, lines = tmp_path / "ledger.jsonl", "", []
    header = {"format": "tfdpsq-ledger/1", "plan": PLAN, "data": DATA, "steps": 1}
    for held in ({**header, "nonce": "0"}, {"step": 0}, {"step": 1}):
        content = json.dumps(held, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256((chain + content).encode()).hexdigest()
        whole = {**held, "chain": chain}
        lines.append(json.dumps(whole, sort_keys=True, separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="ledger.jsonl:3: pays for step 1, yet"):
        read_ledger(path)
    path.write_text("\n".join(lines[:2]) + "\n")
    assert read_ledger(path).steps_paid == 1


def test_a_ledger_of_another_version_and_no_ledger_at_all_are_named(tmp_path, paid):
    paid.write_text(paid.read_text().replace("ledger/1", "ledger/2", 1))
    with pytest.raises(DataError, match="'tfdpsq-ledger/2'. This tfdpsq reads tfdpsq"):
        _open(paid)
    for content in ('{"some": "json"}\n', "text\n", "[]\n", "\n", "\xff", "7\n"):
        paid.write_text(content)
        with pytest.raises(DataError, match="1: .* is not a ledger's header"):
            _open(paid)
    with pytest.raises(DataError, match="nowhere.*Give the ledger.jsonl"):
        read_ledger(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"plan": "cd" * 32}, "the plan changed: abab.*cdcd.*4 steps are paid. Put"),
        ({"data": "x"}, "the private data changed, and 4 steps are paid"),
        ({"steps": 11}, "number of steps changed: 10 when .* 11 now"),
    ],
)
def test_another_plan_or_other_data_are_refused(paid, changed, message):
    before = paid.read_bytes()
    with pytest.raises(InputError, match=message) as raised:
        _open(paid, **changed)
    assert "another ledger" in str(raised.value) and str(paid) in str(raised.value)
    assert paid.read_bytes() == before
    _open(paid).close()  # And the lock of the refused one is gone.


@pytest.mark.parametrize(
    "given", [{"plan": ""}, {"data": None}, {"steps": 0}, {"steps": 2.5}]
)
def test_what_identifies_nothing_is_refused(tmp_path, given):
    with pytest.raises(InputError, match=" is "):
        _open(tmp_path / "new" / "ledger.jsonl", **given)
    assert not (tmp_path / "new").exists()


def test_two_never_share_a_ledger(paid):
    with _open(paid) as ledger:
        with pytest.raises(InputError, match="another process uses it. Wait"):
            _open(paid)
        assert read_ledger(paid) == ledger.summary  # Looking needs no lock.
    with _open(paid) as ledger:
        assert ledger.pay(4)
    with pytest.raises(InputError, match="is closed. Open it again"):
        ledger.pay(5)
    ledger.close()  # Again, to no effect.


def test_a_ledger_deleted_or_changed_while_in_use_stops_the_run(paid):
    content = paid.read_bytes()
    with _open(paid) as ledger:
        paid.unlink()
        with pytest.raises(InputError, match="was deleted or replaced while in use"):
            ledger.pay(4)
        paid.write_bytes(content)  # A copy is another file, that nobody locked.
        with pytest.raises(InputError, match="was deleted or replaced while in use"):
            ledger.pay(4)
    with _open(paid) as ledger:
        with open(paid, "ab") as file:
            file.write(b"more")
        with pytest.raises(DataError, match="another program changed its length"):
            ledger.pay(4)
        assert ledger.steps_paid == 4
