"""Queries for the documents of the training pairs alone: declared, and recorded."""

import pytest
from helpers import framed, tiny

from tfdpsq.data import read_manifest, read_synthetic
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.run.common.kinds import SET
from tfdpsq.run.stages.synthesize import STAGE
from tfdpsq.validation import InputError

_DECLARED = {"documents": "train", "training_documents_are_public": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """8 training, 4 dev and 4 test pairs, and a public generator."""
    base = tmp_path_factory.mktemp("documents")
    tiny.write_start(base, vocabulary=300, train=8, dev=4, test=4)
    with open(base / "pairs" / "qrels" / "train.tsv", "a") as qrels:
        qrels.write("q0\td9\t1\nq1\td10\t0\n")  # a second answer, and none
    lengths = {"document_length": 16, "query_length": 6}
    model = T5QueryGenerator.from_preset(base / "public", **lengths)
    model.save_to_huggingface(base / "short")
    return base


def _run(base, out, **changes):
    usual = {"generator": str(base / "short"), "corpus": str(base / "pairs")}
    usual |= {"batch_size": 8, "shards": 1, "shard_documents": 5}
    return framed.run(STAGE, out, **{**usual, **changes})


def test_set_is_of_the_training_pairs_documents_and_records_the_read(base, tmp_path):
    stage = _run(base, tmp_path / "train", **_DECLARED)
    whole = _run(base, tmp_path / "corpus")
    few, many = (
        {r.document_id: r.query for r in read_synthetic(tmp_path / name / SET)}
        for name in ("train", "corpus")
    )
    wanted = {f"d{number}" for number in (*range(8), 9)}
    left_out = stage["result"]["empty_queries_left_out"]
    assert few.keys() <= wanted and len(few) == 9 - left_out < len(many)
    # A document's query does not depend on which other documents have one.
    assert few.items() <= many.items()
    manifest = read_manifest(tmp_path / "train" / SET)
    (read,) = manifest["provenance"]["private_reads"]
    assert "which documents have private training queries" in read["what"]
    card = (tmp_path / "train" / SET / "README.md").read_text()
    assert f"{read['what']}: {read['where']}" in card
    manifest = read_manifest(tmp_path / "corpus" / SET)
    assert manifest["provenance"]["private_reads"] == []
    # Other training documents are another input, so the set is not taken for theirs.
    inputs, others = stage["depends"]["inputs"], whole["depends"]["inputs"]
    assert "training_documents" in inputs.keys() - others.keys()


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
        _run(base, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
