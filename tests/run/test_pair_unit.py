"""Unit "pair": every pair is a row and a unit, and a query of k pairs is k units."""

import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import framed, tiny

from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.generator import Preprocessor, T5QueryGenerator
from tfdpsq.privacy import fast
from tfdpsq.run.common import direct
from tfdpsq.run.common.kinds import Pairs
from tfdpsq.run.stages import mine, train_retriever
from tfdpsq.validation import InputError

_CLIP = 0.05


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """60 training queries, two of them with 3 and 2 documents: 63 pairs."""
    base = tmp_path_factory.mktemp("pairs")
    tiny.write_start(base, dropout=0.0)
    tiny.add_answers(base)
    return base


def _without(base, directory, *judgements):
    """A copy of the pairs' directory without some (query, document)."""
    shutil.copytree(base / "pairs", directory)
    for path in (directory / "qrels").glob("*.tsv"):
        lines = path.read_text().splitlines(True)
        kept = [x for x in lines if tuple(x.split("\t")[:2]) not in judgements]
        path.write_text("".join(kept))
    return directory


def _clipped(base, path, unit):
    """The sum over a split's rows of their clipped gradients, flat."""
    pairs = Pairs.open(str(path), "pairs").load("train", unit).table
    model = T5QueryGenerator.from_preset(base / "public")
    tokenizer = Tokenizer(base / "public" / "spiece.model")
    preprocessor = Preprocessor(tokenizer, query_length=10, document_length=24)
    rows = preprocessor.arrays(pairs)
    batch = {name: tf.constant(values) for name, values in rows.items()}
    found = fast.clipped_sum(
        lambda: model.per_example_losses(batch, training=True),
        [model],
        model.trainable_variables,
        _CLIP,
    )
    assert float(tf.reduce_min(found.norms)) > _CLIP  # so that every row is clipped
    return np.concatenate([s.numpy().ravel() for s in found.sums]).astype(np.float64)


def test_neighbour_moves_the_clipped_sum_by_what_its_unit_states(base, tmp_path):
    """A pair less: one clip norm. A query of 3 pairs less: up to 3, and more than 1.

    Under unit "query" the same query is one row, and moves the sum by one clip norm.
    """
    whole = {unit: _clipped(base, base / "pairs", unit) for unit in ("query", "pair")}
    pair = _without(base, tmp_path / "pair", ("q0", "d1"))
    query = _without(base, tmp_path / "query", ("q0", "d0"), ("q0", "d1"), ("q0", "d2"))

    def moved(path, unit):
        return np.linalg.norm(whole[unit] - _clipped(base, path, unit)) / _CLIP

    assert moved(pair, "pair") == pytest.approx(1.0, abs=1e-3)
    assert moved(query, "query") == pytest.approx(1.0, abs=1e-3)
    assert 1.5 < moved(query, "pair") <= 3 + 1e-3


def test_removing_a_pair_removes_one_row_of_training_and_changes_no_other(
    base, tmp_path
):
    """A regression: direct training's rows held their query's other documents.

    Removing (q0, d1) moved the sum by 3.5 clip norms in batches without it.
    """
    tokenizer = Tokenizer(base / "public" / "spiece.model")

    def rows(path):
        pairs = Pairs.open(str(path), "pairs").load("train", "pair").table
        found = direct.rows_of(pairs, tokenizer, 10, 24)
        keys = [(pair.query_id, pair.document_id) for pair in pairs]
        return pairs, {
            key: {name: values[row].tolist() for name, values in found.items()}
            for row, key in enumerate(keys)
        }

    pairs, whole = rows(base / "pairs")
    assert list(pairs) == list(BeirDirectory(base / "pairs").all_pairs("train"))
    assert len(whole) == 63 and whole["q0", "d0"]["positive_keys"] == [-1]
    for judgement in (("q0", "d1"), ("q0", "d0"), ("q5", "d6")):
        fewer, left = rows(_without(base, tmp_path / judgement[1], judgement))
        assert left == {key: row for key, row in whole.items() if key != judgement}
        assert list(fewer) == [
            p for p in pairs if (p.query_id, p.document_id) != judgement
        ]


def test_negatives_that_read_other_pairs_are_refused_for_pairs(base):
    framed.run(mine.STAGE, base / "private" / "mined", pairs=str(base / "pairs"))
    own = {"run": str(base / "private" / "mined")}
    settings = tiny.training(base, epsilon=8.0, steps=2, hard_negatives=own)
    settings.update(unit="pair", method="public_negatives")
    with pytest.raises(InputError, match="depend on the query's other pairs"):
        framed.run(train_retriever.STAGE, base / "release" / "refused", **settings)
    assert not (base / "release" / "refused").exists()
    assert not list(base.glob("private/runs/refused/ledger.jsonl"))
