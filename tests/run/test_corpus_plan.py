"""Plans of corpora: every part is read alone, and is what it is in the whole."""

import codecs
import gzip
import json

import numpy as np
import pytest

from tfdpsq.data import BeirDirectory
from tfdpsq.data.texts import documents_fingerprint
from tfdpsq.run.passes.corpus_plan import CorpusPlan, plan_corpus, read_range
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


def _even(parts):
    return lambda count: [count * i // parts for i in range(parts + 1)]


def _read(corpus, plan, index):
    return list(read_range(str(corpus.corpus_file), plan.ranges[index]))


@pytest.mark.parametrize(
    "kind, parts", [("plain", 1), ("bom", 4), ("unended", 23), ("gz", 31)]
)
def test_parts_together_equal_the_corpus(tmp_path, kind, parts):
    corpus = _corpus(tmp_path / "c", 23, kind)
    plan = plan_corpus(str(corpus.corpus_file), _even(parts))
    documents = list(corpus.documents())
    assert plan.documents == len(documents) == 23
    assert plan.fingerprint == documents_fingerprint(documents)
    bounds = _even(parts)(23)
    for index, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        assert _read(corpus, plan, index) == documents[start:stop]
    assert CorpusPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


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
            plan_corpus(str(file), _even(1))
