"""Private reads outside the budget: recorded before they happen, or refused."""

import json
import pathlib
import subprocess
import sys

import pytest

from tfdpsq.privacy.proof.ledger import PrivateReads
from tfdpsq.validation import DataError, InputError

_CHILD = pathlib.Path(__file__).parents[1] / "helpers/ledger_child.py"
_BLEU = {"what": "BLEU on private queries", "where": "the table"}
_LOSS = {"what": "the training loss", "where": "the terminal"}


@pytest.mark.parametrize("on_disk", [False, True])
def test_entries_are_kept_in_order_each_once_and_warned_of(tmp_path, on_disk, caplog):
    path = tmp_path / "new" / "private_reads.jsonl" if on_disk else None
    reads = PrivateReads(path)
    assert reads.entries == []
    assert not (tmp_path / "new").exists()  # Nothing was read.
    for entry in (_LOSS, _BLEU, _LOSS, _BLEU):
        reads.record(**entry)
    assert reads.entries == [_LOSS, _BLEU]
    assert caplog.text.count("BLEU on private queries") == 1
    reads.entries.clear()
    assert reads.entries == [_LOSS, _BLEU]  # The caller's copy is no way in.
    if on_disk:
        lines = path.read_text().splitlines()
        assert [json.loads(line) for line in lines] == [_LOSS, _BLEU]
        again = PrivateReads(path)  # A restarted stage goes on with the list.
        again.record(**_LOSS)
        assert again.entries == [_LOSS, _BLEU]


def test_strict_refuses_and_records_nothing(tmp_path):
    path = tmp_path / "private_reads.jsonl"
    with pytest.raises(InputError, match="strict.*BLEU on private queries"):
        PrivateReads(path, strict=True).record(**_BLEU)
    assert not path.exists()
    # What an earlier run was allowed is no permission.
    PrivateReads(path).record(**_BLEU)
    strict = PrivateReads(path, strict=True)
    assert strict.entries == [_BLEU]
    with pytest.raises(InputError, match="strict"):
        strict.record(**_BLEU)


def test_torn_line_is_cut_off_and_a_damaged_one_named(tmp_path, caplog):
    path = tmp_path / "private_reads.jsonl"
    reads = PrivateReads(path)
    reads.record(**_LOSS)
    first = path.read_bytes()
    reads.record(**_BLEU)
    whole = path.read_bytes()
    for length in range(1, len(whole) - len(first), 7):
        path.write_bytes(whole[: len(first) + length])
        assert PrivateReads(path).entries == [_LOSS]
        assert path.read_bytes() == first
    for bad in (b"{}\n", b"text\n", b'{"what": "x"}\n', b"\n"):
        path.write_bytes(whole + bad)
        with pytest.raises(DataError, match="reads.jsonl:3: .*Restore"):
            PrivateReads(path)


def test_processes_share_one_list(tmp_path):
    path = tmp_path / "private_reads.jsonl"
    children = [
        subprocess.Popen([sys.executable, str(_CHILD), "read", str(path), name])
        for name in "ab"
    ]
    for child in children:
        assert child.wait(60) == 0
    entries = PrivateReads(path).entries
    wheres = ("everyone", "a", "b")
    assert len(entries) == 15 * len(wheres)
    for where in wheres:
        ours = [entry["what"] for entry in entries if entry["where"] == where]
        assert ours == [f"read {number}" for number in range(15)]
    assert path.stat().st_mode & 0o077 == 0
