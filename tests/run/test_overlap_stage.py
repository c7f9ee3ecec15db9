"""The stage `overlap`: what it reads, draws, writes, records, refuses, goes on with."""

import json
import shutil

import pytest
from helpers import framed
from helpers import tiny as _tiny

from tfdpsq.data import BeirDirectory
from tfdpsq.run.stages import overlap
from tfdpsq.validation import DataError, InputError


@pytest.fixture
def base(tmp_path):
    """60 training pairs, and a corpus that holds some of their texts."""
    _tiny.write_pairs(tmp_path / "pairs")
    beir = BeirDirectory(tmp_path / "pairs")
    queries = list(beir.queries().values())
    documents = [document.content for document in beir.documents()]
    (tmp_path / "corpus").mkdir()
    _write(tmp_path / "corpus" / "a.txt", [queries[3].upper(), "nothing of it"])
    inside = f"Before: {documents[5]} And after."
    _write(tmp_path / "corpus" / "b.txt", ["first", f"so {queries[4]}!", inside])
    changed = documents[7].replace("second", "other")
    _write(tmp_path / "corpus" / "c.txt", [documents[6], changed])
    return tmp_path


def _write(path, lines):
    path.write_text("".join(line + "\n" for line in lines))


def _run(base, name="private/overlap", **changes):
    usual = {"data": str(base / "pairs"), "corpus": (str(base / "corpus"),)}
    stage = framed.run(overlap.STAGE, base / name, **{**usual, **changes})
    return json.loads((base / name / overlap.OVERLAP_FILE).read_text()), stage


def test_shares_are_those_of_what_was_planted(base):
    found, stage = _run(base)
    size = sum(len(file.read_text()) for file in (base / "corpus").glob("*"))
    assert found["corpus"]["parts"] == 3 and found["corpus"]["records"] == 7
    assert found["corpus"]["bytes"] == size - 7  # all but the ends of lines
    queries, documents = found["queries"], found["documents"]
    assert (queries["draw_size"], documents["draw_size"]) == (60, 84)
    assert queries["equal"]["share"] == pytest.approx(1 / 60)
    assert queries["contained"]["share"] == pytest.approx(2 / 60)
    assert queries["contained"]["by_draw"] == pytest.approx([2 / 60])
    assert documents["equal"]["share"] == pytest.approx(1 / 84)
    assert documents["contained"]["share"] == pytest.approx(2 / 84)
    assert stage["result"]["queries"] == pytest.approx(2 / 60)


def test_overlap_is_private_and_a_recorded_read(base):
    with pytest.raises(InputError, match="release/, but what overlap makes here"):
        _run(base, "release/overlap")
    with pytest.raises(InputError, match="strict"):
        _run(base, strict=True)
    _run(base)
    (entry,) = framed.reads(base / "private")
    assert "queries of split 'train'" in entry


def test_shards_of_another_corpus_are_not_taken_up(base):
    whole, _ = _run(base, "private/whole")
    sound = (base / "corpus" / "c.txt").read_bytes()
    (base / "corpus" / "c.txt").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"c\.txt:1: byte 1 .* 0xff"):
        _run(base)
    shards = base / "private" / "partial" / "overlap" / "shards"
    assert shards.is_dir() and not (base / "private" / "overlap").exists()
    # What was found in a.txt as it was is not in another one.
    (base / "corpus" / "c.txt").write_bytes(sound)
    old = (base / "corpus" / "a.txt").read_text()
    _write(base / "corpus" / "a.txt", ["x", "y", "z"])
    changed, _ = _run(base)
    assert changed != whole and not shards.exists()
    (base / "corpus" / "a.txt").write_text(old)
    shutil.rmtree(base / "private" / "overlap")
    assert _run(base)[0] == whole


def test_a_corpus_without_text_is_refused(base):
    (base / "empty.txt").write_text("\n")
    for corpus, message in (
        (("/no/such.txt",), "/no/such.txt"),
        ((str(base / "empty.txt"),), "which holds no text"),
        ((), "one text corpus or more"),
    ):
        with pytest.raises(InputError, match=message):
            _run(base, corpus=corpus)
    assert not (base / "private" / "overlap").exists()
