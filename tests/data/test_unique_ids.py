"""Ids that come twice are found in few bytes each, however they come."""

import collections
import random
import sys

import numpy as np
import pytest

from tfdpsq.data import beir_lines, unique_ids
from tfdpsq.data.beir import BeirDirectory, write_beir
from tfdpsq.data.texts import Document
from tfdpsq.data.unique_ids import SeenTexts, UniqueIds
from tfdpsq.validation import DataError


@pytest.mark.parametrize("seed", range(4))
def test_suspects_are_those_that_come_again_and_no_others(seed):
    """Against a Python set, in batches of any size; 64 bits do not collide here."""
    draw = random.Random(seed)
    ids, seen = UniqueIds(), set()
    for _ in range(60):
        batch = [
            f"é{draw.randrange(3000 if seed else 10**9)}"
            for _ in range(draw.randrange(40))
        ]
        twice = {n for n, times in collections.Counter(batch).items() if times > 1}
        assert ids.add(batch) == (seen & set(batch)) | twice
        seen |= set(batch)


def test_another_id_of_the_same_hash_is_a_suspect_but_no_duplicate(
    tmp_path, monkeypatch
):
    """The hash alone decides nothing: here all ids share one of eight."""
    hashes = unique_ids._hashes
    monkeypatch.setattr(unique_ids, "_hashes", lambda names: hashes(names) % 8)
    monkeypatch.setattr(beir_lines, "BATCH", 7)
    assert UniqueIds().add([f"d{i}" for i in range(40)])
    documents = [Document(f"d{i}", "", "text") for i in range(40)]
    write_beir(tmp_path / "set", documents, [("q", "x")], {"train": [("q", "d1", 1)]})
    beir = BeirDirectory(tmp_path / "set")
    assert beir.validate(["train"]).documents == 40
    with (tmp_path / "set" / "corpus.jsonl").open("a") as corpus:
        corpus.write('\n{"_id": "d33", "text": "again"}\n')
        corpus.write('{"_id": "d2", "text": "again"}\nno JSON\n')
    # Whichever is looked for first: d2 is, as its first line shares its hash.
    with pytest.raises(DataError, match="corpus.jsonl:43: id 'd2' occurs on an earl"):
        beir.validate(["train"])


@pytest.mark.parametrize("between", [0, 3, 50])
def test_what_is_wrong_on_the_earlier_line_is_named(tmp_path, monkeypatch, between):
    """Batches are looked at late; even so, the first flaw is the one that is told."""
    monkeypatch.setattr(beir_lines, "BATCH", 8)
    documents = [Document(f"d{i}", "", "text") for i in range(9)]
    write_beir(tmp_path / "set", documents, [("q", "x")], {"train": [("q", "d1", 1)]})
    more = [f'{{"_id": "e{i}", "text": "x"}}\n' for i in range(between)]
    for lines, message in (
        (['{"_id": "d4", "text": "x"}\n', *more, "{\n"], "jsonl:10: id 'd4' occurs"),
        (["{\n", *more, '{"_id": "d4", "text": "x"}\n'], "jsonl:10: not JSON"),
    ):
        path = tmp_path / "set" / "corpus.jsonl"
        whole = path.read_text()
        path.write_text(whole + "".join(lines))
        with pytest.raises(DataError, match=message):
            BeirDirectory(tmp_path / "set").validate(["train"])
        path.write_text(whole)


def test_ids_take_eight_bytes_and_are_kept_in_few_arrays():
    ids = UniqueIds()
    for start in range(0, 200_000, 1000):
        assert not ids.add([f"d{i}" for i in range(start, start + 1000)])
    assert sum(run.nbytes for run in ids._runs) == 8 * 200_000
    assert len(ids._runs) <= 9  # each at least twice as long as the next: log2(200)
    assert ids.add(["d199999", "new"]) == {"d199999"}


def test_seen_texts_is_a_set():
    draw = random.Random(0)
    seen, expected = SeenTexts(recent=64), set()
    for _ in range(5000):
        text = f"{draw.randrange(4000)}\ud800"
        assert (text in seen) == (text in expected)
        if draw.random() < 0.7:
            assert seen.add(text) == (text not in expected)
            expected.add(text)
    assert len(seen) == len(expected) > 2000
    assert 1 < len(seen._runs) < 9
    held = sum(run.upper.nbytes + run.lower.nbytes for run in seen._runs)
    assert held == 16 * (len(seen) - len(seen._recent))


def test_seen_texts_compares_both_halves_of_a_hash(monkeypatch):
    """Texts that share the upper half, by which they are sorted, are still told."""
    monkeypatch.setattr(unique_ids, "_key", lambda text: (7 << 64) + int(text))
    seen = SeenTexts(recent=2)
    for number in range(9):
        assert seen.add(str(number))
    assert not any(seen.add(str(number)) for number in range(9))
    assert "9" not in seen and len(seen) == 9


def test_a_set_in_memory_would_take_ten_times_as_much():
    names = [f"document{i}" for i in range(20_000)]
    as_set = sys.getsizeof(set(names)) + sum(map(sys.getsizeof, names))
    ids = UniqueIds()
    ids.add(names)
    assert sum(run.nbytes for run in ids._runs) * 10 < as_set
    assert np.all(np.diff(ids._runs[0].astype(object)) > 0)
