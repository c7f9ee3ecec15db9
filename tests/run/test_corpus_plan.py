"""Parts of corpora: every part is read alone, and is what it is in the whole."""

import codecs
import gzip
import json
import pickle

import numpy as np
import pytest

from tfdpsq.data import BeirDirectory
from tfdpsq.data.texts import documents_fingerprint
from tfdpsq.run.common.corpus import scan
from tfdpsq.validation import DataError

_BLANK = ["\n", "  \r\n", "\u00a0\n", "\t\n"]


def _corpus(directory, count, kind="plain", seed=0):
    """Documents of many lengths and scripts, between blank lines of all kinds."""
    random = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        lines += random.choice(_BLANK, random.integers(0, 3)).tolist()
        record = {"_id": f"d{number}", "title": "é" * random.integers(0, 3)}
        record["text"] = "wörter 語 " * random.integers(1, 30)
        text = json.dumps(record, ensure_ascii=bool(random.integers(2)))
        lines.append(" " * random.integers(0, 2) + text + random.choice(["\n", "\r\n"]))
    lines += ["\n", "\n"]
    data = "".join(lines).encode()
    if kind == "bom":
        data = codecs.BOM_UTF8 + data
    if kind == "unended":
        data = data.rstrip()
    (directory / "qrels").mkdir(parents=True)
    (directory / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n")
    (directory / "queries.jsonl").write_text('{"_id": "q", "text": "q"}\n')
    if kind == "gz":
        (directory / "corpus.jsonl.gz").write_bytes(gzip.compress(data))
    else:
        (directory / "corpus.jsonl").write_bytes(data)
    return BeirDirectory(directory)


@pytest.mark.parametrize(
    "kind, size", [("plain", 23), ("bom", 6), ("unended", 1), ("gz", 4)]
)
def test_parts_together_equal_the_corpus(tmp_path, kind, size):
    corpus = _corpus(tmp_path / "c", 23, kind)
    found = scan(str(corpus.corpus_file))
    documents = list(corpus.documents())
    assert found.count == len(documents) == 23
    assert found.fingerprint == documents_fingerprint(documents)
    parts = pickle.loads(pickle.dumps(found.cut(size)))
    assert max(parts.size(index) for index in range(len(parts))) <= size
    read = [list(parts.read(index)) for index in range(len(parts))]
    assert [len(part) for part in read] == [parts.size(i) for i in range(len(parts))]
    assert [document for part in read for document in part] == documents


def test_share_of_a_corpus_is_evenly_spread_and_the_same_in_any_parts(tmp_path):
    found = scan(str(_corpus(tmp_path / "c", 23).corpus_file))
    shares = []
    for size in (1, 3, 10):
        parts = found.cut(size, most=10)
        read = (parts.read(index) for index in range(len(parts)))
        shares.append([document.id for part in read for document in part])
    assert shares[0] == shares[1] == shares[2] and len(shares[0]) == 10
    places = [int(name[1:]) for name in shares[0]]
    assert set(np.diff(places)) == {2, 3}
    kept = found.cut(5, only=frozenset(["d3", "d22"]))
    read = (kept.read(index) for index in range(len(kept)))
    assert [document.id for part in read for document in part] == ["d3", "d22"]


@pytest.mark.parametrize("packed", [False, True])
def test_empty_corpora_and_duplicate_ids_are_refused(tmp_path, packed):
    """Before anything is embedded or written for its documents."""
    file = tmp_path / f"corpus.jsonl{'.gz' if packed else ''}"
    lines = [f'{{"_id": "d{i}", "text": "t"}}\n' for i in (0, 1, 2, 1)]
    for content, message in (
        ("", "holds no line"),
        ("\n\n", "holds no line"),
        ("".join(lines), "4: .*'d1'"),
    ):
        data = content.encode()
        file.write_bytes(gzip.compress(data) if packed else data)
        with pytest.raises(DataError, match=message):
            scan(str(file))
