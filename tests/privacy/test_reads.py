"""Private reads outside the budget: recorded before they happen, or refused."""

import json
import pathlib
import subprocess
import sys

import pytest

from tfdpsq.privacy.proof.reads import PrivateReads
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
    reads.record(_LOSS["what"], _BLEU["where"])
    expected = [_LOSS, _BLEU, {"what": _LOSS["what"], "where": _BLEU["where"]}]
    assert reads.entries == expected
    assert caplog.text.count("covered by no epsilon: BLEU on private queries") == 1
    assert caplog.text.count("covered by no epsilon: the training loss") == 2
    reads.entries.clear()
    reads.entries[0]["what"] = "nothing"
    assert reads.entries == expected  # The caller's copy is no way in.
    if on_disk:
        lines = path.read_text().splitlines()
        assert [json.loads(line) for line in lines] == expected


def test_a_restarted_stage_goes_on_with_the_list(tmp_path, caplog):
    path = tmp_path / "private_reads.jsonl"
    PrivateReads(path).record(**_LOSS)
    again = PrivateReads(path)
    assert again.entries == [_LOSS]
    caplog.clear()
    again.record(**_LOSS)
    assert "the training loss" in caplog.text  # This process, too, is told.
    again.record(**_BLEU)
    assert again.entries == [_LOSS, _BLEU]
    assert len(path.read_bytes().splitlines()) == 2


def test_strict_refuses_and_records_nothing(tmp_path):
    path = tmp_path / "private_reads.jsonl"
    with pytest.raises(InputError) as raised:
        PrivateReads(path, strict=True).record(**_BLEU)
    for part in ("BLEU on private queries", "the table", "or turn strict off"):
        assert part in str(raised.value)
    assert not path.exists()
    # What an earlier run was allowed is no permission.
    PrivateReads(path).record(**_BLEU)
    strict = PrivateReads(path, strict=True)
    assert strict.entries == [_BLEU]
    with pytest.raises(InputError, match="strict mode refuses"):
        strict.record(**_BLEU)


@pytest.mark.parametrize("entry", [("", "x"), ("x", " "), (None, "x"), ("x", 7)])
def test_what_says_nothing_is_refused(entry):
    reads = PrivateReads()
    with pytest.raises(InputError, match="say in words wh"):
        reads.record(*entry)
    assert reads.entries == []


@pytest.mark.parametrize("what", ["two\nlines", 'a "quoted" ε', "a\u2028b", "\ud800"])
def test_any_text_makes_one_line(tmp_path, what, caplog):
    path = tmp_path / "private_reads.jsonl"
    PrivateReads(path).record(what, "the table")
    assert "where: the table" in caplog.text.encode("utf-8").decode("utf-8")
    assert path.read_bytes().count(b"\n") == 1
    assert PrivateReads(path).entries == [{"what": what, "where": "the table"}]


def test_a_torn_line_is_cut_off_and_a_wrong_one_named(tmp_path, caplog):
    path = tmp_path / "private_reads.jsonl"
    reads = PrivateReads(path)
    reads.record(**_LOSS)
    first = path.read_bytes()
    reads.record(**_BLEU)
    whole = path.read_bytes()
    for length in range(1, len(whole) - len(first)):
        path.write_bytes(whole[: len(first) + length])
        assert PrivateReads(path).entries == [_LOSS]
        assert path.read_bytes() == first
    assert "had not begun" in caplog.text
    for bad in (b"{}\n", b"[1, 2]\n", b"text\n", b'{"what": 1, "where": "x"}\n', b"\n"):
        path.write_bytes(whole + bad)
        with pytest.raises(
            DataError, match="reads.jsonl:3: .* is not an entry. Restore"
        ):
            PrivateReads(path)


def test_processes_share_one_list(tmp_path):
    path = tmp_path / "private_reads.jsonl"
    children = [
        subprocess.Popen([sys.executable, str(_CHILD), "read", str(path), name])
        for name in "abc"
    ]
    for child in children:
        assert child.wait(60) == 0
    entries = PrivateReads(path).entries
    wheres = ("everyone", "a", "b", "c")
    assert len(entries) == 15 * len(wheres)
    for where in wheres:
        ours = [entry["what"] for entry in entries if entry["where"] == where]
        assert ours == [f"read {number}" for number in range(15)]
    assert path.stat().st_mode & 0o077 == 0
