"""Filters of synthetic sets: what they drop, and what they may not use."""

import shutil

import pytest
from helpers import framed, tiny

from tfdpsq.data import (
    Document,
    read_manifest,
    read_synthetic,
    write_beir,
    write_synthetic,
)
from tfdpsq.run.common import kinds
from tfdpsq.run.stages.filter import STAGE
from tfdpsq.validation import InputError

ROWS = [
    ("sort the array in place", "d0"),
    ("Sort  the ARRAY in place", "d1"),  # a duplicate, and d0's words
    ("parse", "d2"),  # one word
    ("zzyzx qwrk blorp", "d3"),  # no words of the corpus
    ("open a socket", "d4"),
    ("open a network socket", "d4"),
    ("draw the picture on a canvas with a very long brush", "d5"),  # eleven words
]
TEXTS = [
    "Sort the given array in place by its keys.",
    "Read a table from a file in chunks.",
    "Parse a date in any format.",
    "Close the window of the program.",
    "Open a network socket for a host.",
    "Draw a picture on a canvas.",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A corpus, and a set with a guarantee."""
    base = tmp_path_factory.mktemp("filter")
    documents = [Document(f"d{i}", "", text) for i, text in enumerate(TEXTS)]
    write_beir(
        base / "corpus", documents, [("q", "anything")], {"train": [("q", "d0", 1)]}
    )
    rows = ((query, document, TEXTS[int(document[1:])]) for query, document in ROWS)
    tiny.write_set(base / "set", rows, framed.certificate(8.0))
    return base


def _filter(base, out, **options):
    given = {"synthetic": str(base / "set"), "corpus": str(base / "corpus"), **options}
    record = framed.run(STAGE, out, **given)
    kept = [row.query for row in read_synthetic(out / "set")]
    return kept, record["result"]["dropped"]


def test_each_filter_drops_what_it_says(base, tmp_path):
    """One at a time, by hand."""
    queries = [query for query, _ in ROWS]
    cases = [
        ({}, [], {}),
        ({"min_words": 2}, [2], {"words": 1}),
        ({"max_words": 10}, [6], {"words": 1}),
        ({"duplicates": True}, [1], {"duplicates": 1}),
        # d0 comes first for row 1, d4 for both of its own; "parse" finds d2.
        ({"round_trip": 1}, [1, 3], {"round_trip": 2}),
    ]
    for number, (options, gone, counts) in enumerate(cases):
        kept, dropped = _filter(base, tmp_path / str(number), **options)
        assert kept == [q for i, q in enumerate(queries) if i not in gone], options
        assert dropped == counts, options


def test_what_passes_keeps_its_guarantee_and_its_origin(base, tmp_path):
    """The certificate is the set's, to the letter; each drop counts once."""
    out = tmp_path / "release" / "all"
    kept, dropped = _filter(base, out, min_words=2, duplicates=True)
    assert dropped == {"words": 1, "duplicates": 1} and len(kept) == 5
    before, after = (read_manifest(place) for place in (base / "set", out / "set"))
    assert after["guarantee"] == "certified"
    assert after["certificate"] == before["certificate"]
    assert after["provenance"]["of"] == before["provenance"]
    with pytest.raises(InputError, match="part of a set of queries"):
        kinds.Pairs.open(str(out / "set" / "beir"), "pairs")


def test_a_private_set_stays_private(base, tmp_path):
    """Its epsilon is finite, as of a generator trained on canaries: by its own mark."""
    made = tmp_path / "private" / "set"
    rows = read_synthetic(base / "set")
    write_synthetic(made, rows, {}, framed.certificate(8.0), guarantee="private")
    again = tmp_path / "private" / "again"
    _filter(base, again, synthetic=str(made), duplicates=True)
    assert read_manifest(again / "set")["guarantee"] == "private"
    shutil.copytree(again / "set", tmp_path / "copy")
    for path in (made, tmp_path / "copy"):
        with pytest.raises(InputError, match="under release/, but what filter makes"):
            _filter(base, tmp_path / "release" / "out", synthetic=str(path))


def test_bad_settings_are_named(base, tmp_path):
    """Private pairs, limits that nothing passes, or the wrong corpus."""
    judged = {"train": [("q", "d0", 1)]}
    write_beir(tmp_path / "part", [Document("d0", "", TEXTS[0])], [("q", "x")], judged)
    for options, message in (
        ({"synthetic": str(base / "corpus")}, "Give a set of queries"),
        ({"min_words": 5, "max_words": 3}, "no query passes"),
        ({"min_words": 99}, "no query of .*set passes; .* {'words': 7}"),
        ({"corpus": str(tmp_path / "part"), "round_trip": 1}, "'d1', which"),
    ):
        with pytest.raises(InputError, match=message):
            _filter(base, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists(), options
