"""Queries for the documents of the training pairs alone: declared, and recorded."""

import pytest
from helpers import tiny as _tiny

from tfdpsq.data import BeirDirectory, read_manifest, read_synthetic
from tfdpsq.run import synthesize
from tfdpsq.run.core import layout
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """8 training, 4 dev and 4 test pairs, and a public generator."""
    base = tmp_path_factory.mktemp("documents")
    _tiny.write_start(base, vocabulary=300, train=8, dev=4, test=4)
    with open(base / "pairs" / "qrels" / "train.tsv", "a") as qrels:
        qrels.write("q0\td9\t1\nq1\td10\t0\n")  # a second answer, and none
    return base


def _config(base, **options):
    return _tiny.config(
        synthesize,
        options,
        generator=str(base / "public"),
        corpus=str(base / "pairs"),
        document_length=16,
        query_length=6,
        batch_size=8,
        shards=1,
        shard_documents=5,
    )


def test_the_set_is_of_the_training_pairs_documents_and_says_so(base, tmp_path):
    declared = {"documents": "train", "training_documents_are_public": True}
    stage = synthesize.run(_config(base, **declared), tmp_path / "train")
    whole = synthesize.run(_config(base), tmp_path / "corpus")
    sets = [
        {
            row.document_id: row.query
            for row in read_synthetic(tmp_path / n / layout.SET)
        }
        for n in ("train", "corpus")
    ]
    wanted = {f"d{number}" for number in (*range(8), 9)}
    left_out = stage["result"]["empty_queries_left_out"]
    assert sets[0].keys() <= wanted and len(sets[0]) == 9 - left_out
    assert len(sets[1]) > len(sets[0])
    # A document's query does not depend on which other documents have one.
    assert all(sets[1][document] == query for document, query in sets[0].items())
    (read,) = stage["result"]["private_reads"]
    assert "which documents have private training queries" in read["what"]
    manifest = read_manifest(tmp_path / "train" / layout.SET)
    assert manifest["provenance"]["private_reads"] == [read]
    assert whole["result"]["private_reads"] == []
    # Other training documents are another input, so the set is not taken for theirs.
    assert stage["inputs"]["training_documents"] != stage["inputs"]["corpus"]
    assert "training_documents" not in whole["inputs"]


def test_documents_follow_the_pairs_so_that_a_neighbour_shows(base, tmp_path):
    """Why a declaration is asked for: a query less, and its document has no query."""
    pairs = tmp_path / "pairs"
    (pairs / "qrels").mkdir(parents=True)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/dev.tsv", "qrels/test.tsv"):
        (pairs / name).symlink_to(base / "pairs" / name)
    lines = (base / "pairs" / "qrels" / "train.tsv").read_text().splitlines(True)
    kept = [line for line in lines if not line.startswith("q3\t")]
    (pairs / "qrels" / "train.tsv").write_text("".join(kept))
    whole, left = (
        synthesize.training_documents(_config(base, corpus=str(path)))
        for path in (base / "pairs", pairs)
    )
    assert whole - left == {"d3"} and not left - whole
    assert len(BeirDirectory(pairs).positives("train")) == 7


@pytest.mark.parametrize(
    "options, message",
    [
        ({"documents": "train"}, "Set training_documents_are_public to True"),
        (
            {"training_documents_are_public": True},
            "training_documents_are_public is True, which does nothing",
        ),
        (
            {
                "documents": "train",
                "training_documents_are_public": True,
                "max_documents": 3,
            },
            "max_documents is 3, which does nothing",
        ),
        ({"documents": "all"}, "documents is 'all'; choose one of"),
    ],
)
def test_undeclared_documents_are_refused_before_anything_is_read(
    tmp_path, options, message
):
    config = _tiny.config(synthesize, options, generator="nowhere", corpus="nowhere")
    with pytest.raises(InputError, match=message):
        synthesize.run(config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_split_that_is_not_there_is_refused(base, tmp_path):
    declared = {"documents": "train", "training_documents_are_public": True}
    with pytest.raises(InputError, match="train2.tsv.*missing"):
        synthesize.run(_config(base, split="train2", **declared), tmp_path / "out")
    assert not (tmp_path / "out").exists()
