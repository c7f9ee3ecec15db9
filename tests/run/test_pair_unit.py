"""Unit "pair": every pair is a row and a unit, and a query of k pairs is k units."""

import math

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq import retriever
from tfdpsq.data import BeirDirectory, Tokenizer
from tfdpsq.generator import T5QueryGenerator, encode_pairs
from tfdpsq.privacy import fast, read_certificate, verify_certificate
from tfdpsq.run import finetune, train_retriever, verify
from tfdpsq.run.core import sources
from tfdpsq.run.training import direct_training, private_training
from tfdpsq.validation import InputError

_CLIP = 0.05


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """60 training queries, two of them with 3 and 2 documents: 63 pairs."""
    base = tmp_path_factory.mktemp("pairs")
    _tiny.write_start(base, dropout=0.0)
    _tiny.add_answers(base)
    return base


def _config(stage, base, **options):
    config = stage.default_config()
    usual = _tiny.training(base, microbatch_size=4, steps=2, epsilon=8.0)
    config.update({**usual, **options})
    return config


def _without(base, tmp_path, *judgements):
    """A copy of the pairs' directory without some (query, document)."""
    copy = tmp_path / "neighbour"
    (copy / "qrels").mkdir(parents=True)
    for name in ("corpus.jsonl", "queries.jsonl"):
        (copy / name).symlink_to(base / "pairs" / name)
    for path in (base / "pairs" / "qrels").glob("*.tsv"):
        lines = path.read_text().splitlines(True)
        kept = [x for x in lines if tuple(x.split("\t")[:2]) not in judgements]
        (copy / "qrels" / path.name).write_text("".join(kept))
    return copy


def _clipped(base, path, unit):
    """The sum over a split's rows of their clipped gradients, flat."""
    config = _config(finetune, base, pairs=str(path), unit=unit)
    source = sources.load_source(config.pairs, config.split, config.unit)
    assert private_training.units_of(source, unit, "").count == len(source.pairs)
    model = T5QueryGenerator.from_preset(base / "public")
    tokenizer = Tokenizer(base / "public" / "spiece.model")
    rows = encode_pairs(source.pairs, tokenizer, query_length=10, document_length=24)
    batch = {name: tf.constant(values) for name, values in rows.items()}
    found = fast.clipped_sum(
        lambda: model.per_example_losses(batch, training=True),
        [model],
        model.trainable_variables,
        _CLIP,
    )
    assert float(tf.reduce_min(found.norms)) > _CLIP  # so that every row is clipped
    return np.concatenate([s.numpy().ravel() for s in found.sums]).astype(np.float64)


def test_a_neighbour_moves_the_clipped_sum_by_what_its_unit_states(base, tmp_path):
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


def test_removing_a_pair_removes_one_row_and_changes_no_other(base, tmp_path):
    whole = BeirDirectory(base / "pairs").all_pairs("train")
    assert len(whole) == 63
    for judgement in (("q0", "d0"), ("q5", "d6"), ("q7", "d7")):
        path = _without(base, tmp_path / judgement[1], judgement)
        left = sources.load_source(str(path), "train", "pair").pairs
        assert [p for p in whole if (p.query_id, p.document_id) != judgement] == left


def test_no_row_of_direct_training_reads_another_pair(base, tmp_path):
    """A regression: rows held the contents of their query's other pairs.

    Removing (q0, d1) moved the sum by 3.5 clip norms in batches without it.
    """
    tokenizer = Tokenizer(base / "public" / "spiece.model")

    def rows(path):
        pairs = sources.load_source(str(path), "train", "pair").pairs
        found = direct_training.rows_of(pairs, tokenizer, 10, 24)
        keys = [(pair.query_id, pair.document_id) for pair in pairs]
        return {
            key: {name: values[row].tolist() for name, values in found.items()}
            for row, key in enumerate(keys)
        }

    whole = rows(base / "pairs")
    assert len(whole) == 63 and whole["q0", "d0"]["positive_keys"] == [-1]
    for judgement in (("q0", "d1"), ("q0", "d0"), ("q5", "d6")):
        left = rows(_without(base, tmp_path / judgement[1], judgement))
        assert left == {key: row for key, row in whole.items() if key != judgement}


def test_n_and_delta_follow_from_the_pairs_and_the_words_are_of_pairs(base, capsys):
    config = _config(finetune, base, unit="pair")
    finetune.run(config, base / "generator")
    certificate = read_certificate(base / "generator")
    assert certificate["guarantee"]["unit"] == "pair"
    assert certificate["sampler"]["n"] == 63
    assert certificate["guarantee"]["delta"] == 1 / 126
    assert (
        "adding or removing one pair"
        in certificate["mechanism"]["sensitivity_argument"]
    )
    assert verify_certificate(certificate).problems == ()
    path = base / "generator" / "certificate.json"
    with pytest.raises(SystemExit) as ended:
        verify.main(["verify", str(path)])
    said = capsys.readouterr().out
    assert not ended.value.code and "one pair: one query with one of" in said


@pytest.mark.parametrize(
    "method", [pytest.param("naive", marks=pytest.mark.slow), "public_negatives"]
)
def test_direct_training_states_the_sensitivity_of_a_pair(base, method):
    config = _config(train_retriever, base, unit="pair", method=method, negatives=20)
    config.embedding_dim = 16
    train_retriever.run(
        _tiny.acting_only(train_retriever, config), base / f"direct_{method}"
    )
    certificate = read_certificate(base / f"direct_{method}")
    assert certificate["sampler"]["n"] == 63
    words = certificate["mechanism"]["sensitivity_argument"]
    assert "one pair" in words and "one query" not in words and "{" not in words
    assert verify_certificate(certificate).problems == ()
    assert words == direct_training.ARGUMENTS[method].format(unit="pair")


@pytest.mark.parametrize("method", retriever.METHODS)
def test_every_methods_argument_is_of_its_unit(method):
    words = direct_training.ARGUMENTS[method].format(unit="pair").lower()
    assert "one pair" in words and "one query" not in words and "{" not in words
    assert "one query" in direct_training.ARGUMENTS[method].format(unit="query").lower()


def test_negatives_that_read_other_pairs_are_refused_for_pairs(base):
    config = _config(train_retriever, base, unit="pair", method="public_negatives")
    config.hard_negatives.run = "judged"
    with pytest.raises(InputError, match="would depend on the query's other pairs"):
        train_retriever.run(config, base / "refused")
    assert not (base / "refused").exists()
    assert not list(base.glob("private/runs/refused/ledger.jsonl"))


def test_plain_training_takes_all_pairs_and_guarantees_none(base):
    config = _config(train_retriever, base, unit="pair", epsilon=math.inf)
    config.embedding_dim = 16
    train_retriever.run(_tiny.acting_only(train_retriever, config), base / "original")
    certificate = read_certificate(base / "original")
    assert certificate["spec"]["n"] == 63 and certificate["spec"]["unit"] == "pair"
    assert certificate["private"] is False
