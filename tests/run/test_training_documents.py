"""Queries for the documents of the training pairs alone: declared, and recorded."""

import shutil

import pytest
from helpers import tiny

from tfdpsq.data import read_manifest, read_synthetic
from tfdpsq.run import synthesize
from tfdpsq.run.core import layout
from tfdpsq.validation import InputError

_DECLARED = {"documents": "train", "training_documents_are_public": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """8 training, 4 dev and 4 test pairs, and a public generator."""
    base = tmp_path_factory.mktemp("documents")
    tiny.write_start(base, vocabulary=300, train=8, dev=4, test=4)
    with open(base / "pairs" / "qrels" / "train.tsv", "a") as qrels:
        qrels.write("q0\td9\t1\nq1\td10\t0\n")  # a second answer, and none
    return base


def _config(base, **options):
    return tiny.config(
        synthesize,
        options,
        generator=str(base / "public"),
        corpus=str(base / "pairs"),
        max_length=6,
        batch_size=8,
        shards=1,
        shard_documents=5,
    )


def test_set_is_of_the_training_pairs_documents_and_records_the_read(base, tmp_path):
    stage = synthesize.run(_config(base, **_DECLARED), tmp_path / "train")
    whole = synthesize.run(_config(base), tmp_path / "corpus")
    few, many = (
        {r.document_id: r.query for r in read_synthetic(tmp_path / name / layout.SET)}
        for name in ("train", "corpus")
    )
    wanted = {f"d{number}" for number in (*range(8), 9)}
    left_out = stage["result"]["empty_queries_left_out"]
    assert few.keys() <= wanted and len(few) == 9 - left_out < len(many)
    # A document's query does not depend on which other documents have one.
    assert few.items() <= many.items()
    (read,) = stage["result"]["private_reads"]
    assert "which documents have private training queries" in read["what"]
    manifest = read_manifest(tmp_path / "train" / layout.SET)
    assert manifest["provenance"]["private_reads"] == [read]
    assert whole["result"]["private_reads"] == []
    # Other training documents are another input, so the set is not taken for theirs.
    assert stage["inputs"]["training_documents"] != stage["inputs"]["corpus"]
    assert "training_documents" not in whole["inputs"]


def test_removing_a_query_removes_its_document(base, tmp_path):
    """Why a declaration is asked for."""
    pairs = shutil.copytree(base / "pairs", tmp_path / "pairs")
    lines = (pairs / "qrels" / "train.tsv").read_text().splitlines(True)
    kept = [line for line in lines if not line.startswith("q3\t")]
    (pairs / "qrels" / "train.tsv").write_text("".join(kept))
    whole, left = (
        synthesize.training_documents(_config(base, corpus=str(path)))
        for path in (base / "pairs", pairs)
    )
    assert whole - left == {"d3"} and not left - whole


@pytest.mark.parametrize(
    "options, message",
    [
        ({"documents": "train"}, "Set training_documents_are_public to True"),
        ({"training_documents_are_public": True}, "training_documents_are_public"),
        ({**_DECLARED, "max_documents": 3}, "max_documents is 3"),
        ({**_DECLARED, "split": "train2"}, "train2.tsv.*missing"),
    ],
)
def test_undeclared_or_missing_documents_are_refused(base, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        synthesize.run(_config(base, **options), tmp_path / "out")
    assert not list(tmp_path.iterdir())
