"""What the losses of direct DP training read, and what they refuse."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tfdpsq import retriever
from tfdpsq.data.rows import write_rows
from tfdpsq.layers import train_only
from tfdpsq.privacy import fast
from tfdpsq.retriever import (
    GroupLosses,
    NaiveLosses,
    PublicNegatives,
    encode_pairs,
)
from tfdpsq.retriever.stored_pairs import PooledQueries
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
    batch = retriever.collate(arrays, np.arange(4))
    found = losses({k: tf.constant(v) for k, v in batch.items()}).numpy()
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
    alone = retriever.collate(arrays, np.array([2]))
    np.testing.assert_allclose(
        losses({k: tf.constant(v) for k, v in alone.items()}).numpy(),
        found[2:3],
        rtol=1e-4,
    )


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
    batch = retriever.collate(arrays, np.arange(4))
    batch = {name: tf.constant(value) for name, value in batch.items()}
    fast.check(lambda: losses(batch), losses.layers, model.trainable_variables)


def test_frozen_documents_are_embedded_once(make_model, make_rows, tokenizer):
    """The losses are those of encoding them anew, hard negatives included."""
    model = make_model(shared=False)
    train_only(model, ["query_tower/*"])
    rows = make_rows(30)
    arrays = retriever.encode_pairs(rows, tokenizer, **LENGTHS)
    hard = {row.query_id: [rows[3].document, rows[7].document] for row in rows[:20]}
    arrays.update(retriever.encode_negatives(rows, hard, tokenizer, 12, 2))
    corpus = {n: v for n, v in arrays.items() if n.startswith("document")}
    found = []
    for prepare in (lambda values: values, lambda v: retriever.with_vectors(model, v)):
        losses = PublicNegatives(model, prepare(corpus), 6, seed=4)
        losses.refresh(3)
        batch = retriever.collate(prepare(arrays), np.arange(10))
        batch = {name: tf.constant(values) for name, values in batch.items()}
        with tf.GradientTape() as tape:
            loss = losses(batch)
        found.append([loss, *tape.gradient(loss, model.trainable_variables)])
        in_batch = model.per_example_losses(batch)
        found[-1].append(in_batch)
        batch = {n: v for n, v in batch.items() if not n.startswith("negative")}
        with tf.GradientTape() as tape:
            loss = GroupLosses(model, 5)(batch)
        found[-1] += [loss, *tape.gradient(loss, model.trainable_variables)]
        loss, gradient = NaiveLosses(model, 5)(batch)
        found[-1] += [loss, *gradient(tf.ones([10]), model.trainable_variables)]
    for one, other in zip(*found):
        one, other = (tf.convert_to_tensor(values) for values in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match="Train the query tower alone"):
        retriever.with_vectors(make_model(), corpus)


def test_frozen_queries_are_pooled_once(make_model, make_rows, tokenizer, tmp_path):
    """Losses, clipped sums and norms equal those of encoding in every step."""
    model = make_model(shared=False)
    train_only(model, ["query_tower/projection/kernel"])
    arrays = retriever.encode_pairs(make_rows(30), tokenizer, **LENGTHS)
    arrays = retriever.with_vectors(model, arrays)
    pooled = PooledQueries(
        tmp_path / "states", write_rows(tmp_path / "rows", [arrays]), model
    )
    found = []
    for rows in (arrays, pooled.take(range(30))):
        losses = PublicNegatives(model, arrays, 6, seed=4)
        losses.refresh(3)
        batch = retriever.collate(rows, np.arange(10))
        batch = {name: tf.constant(values) for name, values in batch.items()}
        found.append([model.per_example_losses(batch)])
        for one in (losses, GroupLosses(model, 5)):
            variables = model.trainable_variables
            result = fast.clipped_sum(
                functools.partial(one, batch), one.layers, variables, 0.5
            )
            found[-1] += [result.losses, *result.sums, result.norms]
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert np.max(found[0][-1]) > 0.5


def test_public_negatives_resume_from_their_state(make_model, make_rows, tokenizer):
    """A killed run goes on with negatives embedded by weights that are gone."""
    model, rows = make_model(), make_rows(8)
    corpus = retriever.encode_documents([row.document for row in rows], tokenizer, 12)
    batch = retriever.collate(
        retriever.encode_pairs(rows, tokenizer, **LENGTHS), np.arange(4)
    )
    batch = {name: tf.constant(value) for name, value in batch.items()}
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
