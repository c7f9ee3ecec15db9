"""What the losses of direct DP training read, and what they refuse."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from helpers.retrieval import tensors

from tfdpsq import retriever
from tfdpsq.data import write_rows
from tfdpsq.layers import train_only
from tfdpsq.privacy import fast
from tfdpsq.retriever import (
    GroupLosses,
    NaiveLosses,
    PublicNegatives,
    encode_pairs,
)
from tfdpsq.validation import InputError

LENGTHS = {"query_length": 6, "document_length": 12}


def test_public_negatives_are_drawn_by_step_and_kept_between_refreshes(
    make_model, make_rows, tokenizer
):
    model = make_model()
    texts = [row.document for row in make_rows(30)]
    corpus = retriever.encode_documents(texts, tokenizer, 12)
    losses = PublicNegatives(model, corpus, 6, seed=4, refresh_every=2)

    def held(step):
        losses.refresh(step)
        embeddings, keys = (variable.numpy() for variable in losses.state)
        return embeddings, keys

    first, second, third = held(0), held(1), held(2)
    np.testing.assert_array_equal(first[1], second[1])
    assert set(first[1]) != set(third[1])
    assert len(set(first[1])) == 6 and set(first[1]) <= set(corpus["document_key"])
    again = PublicNegatives(model, corpus, 6, seed=4, refresh_every=2)
    again.refresh(2)
    np.testing.assert_array_equal(again.state[1].numpy(), third[1])
    # The embeddings are those of the weights as they are now.
    chosen = [int(np.flatnonzero(corpus["document_key"] == key)[0]) for key in third[1]]
    expected = model.encode_documents(
        corpus["document_ids"][chosen], corpus["document_lengths"][chosen]
    )
    np.testing.assert_allclose(third[0], expected, atol=1e-6)


def test_public_negatives_of_a_row_depend_on_it_alone(make_model, make_rows, tokenizer):
    model, rows = make_model(), make_rows(4)
    corpus = retriever.encode_documents([row.document for row in rows], tokenizer, 12)
    losses = PublicNegatives(model, corpus, 4, seed=0)
    losses.refresh(0)
    arrays = retriever.encode_pairs(rows, tokenizer, **LENGTHS)
    found = losses(tensors(arrays, range(4))).numpy()
    queries, documents = (
        np.asarray(encode(arrays[f"{side}_ids"], arrays[f"{side}_lengths"]))
        for side, encode in (
            ("query", model.encode_queries),
            ("document", model.encode_documents),
        )
    )
    scores = 20.0 * queries @ documents.T
    # All four documents are negatives, but for each row's own: it stands once.
    expected = np.log(np.exp(scores - scores.max()).sum(1)) + scores.max()
    np.testing.assert_allclose(found, expected - np.diag(scores), rtol=1e-4)
    # A row more, or one less, leaves the others' losses as they are.
    alone = losses(tensors(arrays, [2])).numpy()
    np.testing.assert_allclose(alone, found[2:3], rtol=1e-4)


def test_settings_without_a_derived_bound_are_refused(make_model, make_rows, tokenizer):
    texts = [row.document for row in make_rows(4)]
    corpus = retriever.encode_documents(texts, tokenizer, 12)
    both = make_model(bidirectional=True)
    for make in (
        lambda model: NaiveLosses(model, 2),
        lambda model: PublicNegatives(model, corpus, 2, seed=0),
    ):
        with pytest.raises(InputError, match="bidirectional is True, but"):
            make(both)


@pytest.mark.parametrize(
    "method",
    ["public_negatives", pytest.param("microbatch", marks=pytest.mark.slow)],
)
def test_a_learned_scale_counts_in_the_norm(make_model, make_rows, tokenizer, method):
    """The engine's rules hold for every method's own use of the scale."""
    model = make_model(learned_scale=True)
    arrays = encode_pairs(make_rows(4), tokenizer, **LENGTHS)
    losses = {
        "microbatch": lambda: GroupLosses(model, 2),
        "public_negatives": lambda: PublicNegatives(model, arrays, 3, seed=0),
    }[method]()
    if method == "public_negatives":
        losses.refresh(0)
    batch = tensors(arrays, range(4))
    fast.check(lambda: losses(batch), losses.layers, model.trainable_variables)


def test_public_negatives_resume_from_their_state(make_model, make_rows, tokenizer):
    """A killed run goes on with negatives embedded by weights that are gone."""
    model, rows = make_model(), make_rows(8)
    corpus = retriever.encode_documents([row.document for row in rows], tokenizer, 12)
    batch = tensors(retriever.encode_pairs(rows, tokenizer, **LENGTHS), range(4))
    before = PublicNegatives(model, corpus, 5, seed=3, refresh_every=4)
    before.refresh(0)
    for weight in model.trainable_variables:  # steps 0 to 2
        weight.assign(1.3 * weight + 0.01)
    expected = before(batch).numpy()
    after = PublicNegatives(model, corpus, 5, seed=3, refresh_every=4)
    # As `train` does: tried out at step 0, then the state restored, then step 3.
    after.refresh(0)
    assert np.abs(after(batch).numpy() - expected).max() > 1e-3
    for variable, kept in zip(after.state, before.state):
        variable.assign(kept)
    after.refresh(3)
    np.testing.assert_allclose(after(batch).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("method", ["naive", "microbatch", "public_negatives"])
def test_frozen_documents_have_no_gradient_and_no_dropout(
    make_model, make_config, make_rows, tokenizer, method
):
    t5 = dataclasses.replace(make_config().t5, dropout=0.5)
    model = make_model(shared=False, t5=t5)
    train_only(model, ["query_tower/projection/kernel"])
    arrays = encode_pairs(make_rows(6), tokenizer, **LENGTHS)
    batch = tensors(arrays, range(6))
    one, other = (
        model.encode_documents(batch["document_ids"], batch["document_lengths"], True)
        for _ in range(2)
    )
    np.testing.assert_array_equal(one, other)
    variables = model.trainable_variables
    if method == "naive":
        _, gradient = NaiveLosses(model, 3)(batch)
        (found,) = gradient(tf.ones([6]), variables)
    else:
        losses = GroupLosses(model, 3)
        if method == "public_negatives":
            losses = PublicNegatives(model, arrays, 3, seed=0)
            losses.refresh(0)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(losses(batch))
        (found,) = tape.gradient(total, variables)
    assert np.abs(found).max() > 1e-3


@pytest.mark.parametrize("pooled", [False, True])
def test_frozen_rows_have_the_losses_and_norms_of_encoding_in_every_step(
    make_model, make_rows, tokenizer, tmp_path, pooled
):
    model = make_model(shared=False)
    train_only(model, ["query_tower/projection/kernel" if pooled else "query_tower/*"])
    rows = make_rows(150)
    arrays = encode_pairs(rows, tokenizer, **LENGTHS)
    hard = {row.query_id: [rows[3].document, rows[7].document] for row in rows[:20]}
    arrays.update(retriever.encode_negatives(rows, hard, tokenizer, 12, 2))
    stored = write_rows(tmp_path / "rows", [arrays])
    frozen = retriever.frozen_rows(tmp_path / "frozen", stored, model)
    again = retriever.frozen_rows(tmp_path / "frozen", stored, model)
    at = np.array([149, 3, 3, 0, 127, 128])
    made = frozen.take(at)
    assert ("query_ids" in made) != pooled and "document_ids" not in made
    found = []
    for batch in (stored.take(at), made, again.take(at)):
        batch = {**batch, "weights": np.ones(6, np.float32)}
        batch = {name: tf.constant(values) for name, values in batch.items()}
        losses = PublicNegatives(model, arrays, 6, seed=4)
        losses.refresh(3)
        result = fast.clipped_sum(
            lambda losses=losses, batch=batch: losses(batch),
            losses.layers,
            model.trainable_variables,
            0.5,
        )
        few = {n: v for n, v in batch.items() if not n.startswith("negative")}
        in_groups = GroupLosses(model, 3)(few)
        found.append([result.losses, *result.sums, result.norms, in_groups])
    for one, *others in zip(*found):
        for other in others:
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert np.max(found[0][-2]) > 0.5


def test_frozen_rows_are_bitwise_independent(
    make_model, make_rows, tokenizer, tmp_path
):
    """Another text in its batch changes no bit of a row."""
    model = make_model(shared=False)
    train_only(model, ["query_tower/projection/kernel"])
    arrays = encode_pairs(make_rows(60), tokenizer, **LENGTHS)
    changed = {name: values.copy() for name, values in arrays.items()}
    for side in ("query", "document"):
        changed[f"{side}_ids"][8:16, 0] = arrays[f"{side}_ids"][8:16, 0] % 50 + 3
        changed[f"{side}_lengths"][9] = 1
    one, two = (
        retriever.frozen_rows(
            tmp_path / f"frozen{number}",
            write_rows(tmp_path / f"rows{number}", [given]),
            model,
        ).take(range(60))
        for number, given in enumerate((arrays, changed))
    )
    same = [n for n in range(60) if not 8 <= n < 16]
    for name in ("document_vectors", "query_states"):
        np.testing.assert_array_equal(one[name][same], two[name][same], strict=True)
        assert (one[name][10] != two[name][10]).any()
