"""Public pretraining of a T5: its rows, its batches, its losses.

Pseudo-queries are sentences of a document. Two tasks share each batch: the decoder
writes a pseudo-query from its document, from which it was mostly cut out (gap-sentence
generation; Zhang et al. 2020, *PEGASUS*), and the encoder tells the document that it is
from among all of the batch (inverse cloze; Lee et al. 2019).

A tiny T5 can lower its losses while its encoder maps everything to one point or its
decoder never looks at the document. The contrastive loss shows the first; for the
second, held-out pseudo-queries are also predicted from the wrong document.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdpsq.data import PROMPT, Document, RowStore, Tokenizer, pseudo_pairs
from tfdpsq.data.pseudo_queries import parts_of, pieces_of
from tfdpsq.data.tokenization import encode_all
from tfdpsq.generator.model import QueryLoss, T5QueryGenerator, descend
from tfdpsq.layers import MaskedMeanPooling, dropout_seed
from tfdpsq.layers.seeded_dropout import seed_of_step

LOSSES = ("pseudo_queries", "contrast")
_CHUNK = 512

_pool = MaskedMeanPooling()


def is_held_out(document_id: str, one_in: int = 50) -> bool:
    """Returns whether a document, one in `one_in` by its id's hash, is held out."""
    return _key(document_id) % one_in == 0


def passages(document: Document, words: int) -> Iterator[Document]:
    """Cuts a document, at ends of lines or sentences, into passages.

    A sentence from beyond what the model reads could be neither copied nor
    distinguished. A passage ends once it has this many words; a last one of less than
    half as many stays with the one before. Their ids end in "#0", "#1", ...; the first
    has the title.
    """
    parts, count, left = [""], 0, len(parts_of(document.text))
    for piece in pieces_of(document.text):
        if count >= words and left >= words / 2:
            parts.append("")
            count = 0
        parts[-1] += piece
        count += len(parts_of(piece))
        left -= len(parts_of(piece))
    for number, text in enumerate(parts):
        title = "" if number else document.title
        yield Document(f"{document.id}#{number}", title, text)


def pair_rows(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    lengths: tuple[int, int],
    per_passage: int,
    seed: int,
    passage_words: int = 50,
    whole: float = 0.15,
    bare: float = 0.5,
) -> Iterator[dict[str, np.ndarray]]:
    """Pseudo-queries with their passages, as chunks of rows for `write_rows`.

    Args:
      documents: public ones, streamed.
      tokenizer: the model's.
      lengths: most tokens of a document, L, and of a query, T, EOS included.
      per_passage: pseudo-queries a passage at most.
      seed: draws which sentences, and the two shares.
      passage_words: see `passages`.
      whole: share of the pseudo-queries whose document still holds them.
      bare: share of the documents without prompt, as a retriever reads them.

    Yields:
      "document_ids" [n, L] and "query_ids" [n, T], padded with 0, "document_lengths"
      and "query_lengths" [n], all int32; "document_key" [n] int64, the same for rows of
      one document.
    """
    random = np.random.default_rng(seed)
    stream = (p for d in documents for p in passages(d, passage_words))
    while chunk := list(itertools.islice(stream, _CHUNK)):
        content = {passage.id: passage.content for passage in chunk}
        pairs = list(pseudo_pairs(chunk, seed, per_passage))
        texts = [
            ("" if random.random() < bare else PROMPT)
            + (content[pair.document_id] if random.random() < whole else pair.document)
            for pair in pairs
        ]
        queries = [pair.query for pair in pairs]
        keys = [_key(pair.document_id.rpartition("#")[0]) for pair in pairs]
        rows = {"document_key": np.array(keys, np.int64)}
        for name, of, length in zip(("document", "query"), (texts, queries), lengths):
            ids, sizes = encode_all(tokenizer.encode, of, length)
            rows |= {f"{name}_ids": ids, f"{name}_lengths": sizes}
        if pairs:
            yield rows


class Batches:
    """The batches of pretraining, each a function of the seed and its number alone."""

    def __init__(self, rows: RowStore, size: int, seed: int):
        """Takes rows of `pair_rows`, of which a batch has `size`."""
        self._rows, self._size, self._seed = rows, size, seed

    def __call__(self, number: int) -> dict[str, np.ndarray]:
        """Returns the batch of a step, from 0."""
        random = np.random.default_rng([self._seed, number])
        return self._rows.take(random.integers(len(self._rows), size=self._size))

    def dataset(self, first: int, steps: int) -> tf.data.Dataset:
        """Returns the batches for `Pretrainer.fit`, in the scope that it runs in.

        Each replica has its share of the batches `first` to `steps` - 1.
        """

        def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            count = context.num_replicas_in_sync
            own = count // context.num_input_pipelines
            replicas = range(own * context.input_pipeline_id, count)[:own]

            def shares() -> Iterator[dict[str, np.ndarray]]:
                for step in range(first, steps):
                    split = {n: np.split(v, count) for n, v in self(step).items()}
                    for replica in replicas:
                        yield {name: parts[replica] for name, parts in split.items()}

            signature = {
                name: tf.TensorSpec([len(v) // count, *v.shape[1:]], v.dtype)
                for name, v in self(0).items()
            }
            dataset = tf.data.Dataset.from_generator(shares, output_signature=signature)
            return dataset.prefetch(2)

        strategy = tf.distribute.get_strategy()
        return strategy.distribute_datasets_from_function(of_worker)


def epochs_in(backup: str | os.PathLike) -> int:
    """Returns the epochs in a directory of `BackupAndRestore`, 0 where there is none.

    Keras goes on with the state and the counters, but not with the data.
    """
    latest = tf.train.latest_checkpoint(os.path.join(backup, "chief"))
    name = "ckpt_saved_epoch/.ATTRIBUTES/VARIABLE_VALUE"
    return 0 if latest is None else int(tf.train.load_variable(latest, name)) + 1


class Pretrainer(tf.keras.Model):
    """Trains a T5 without soft prompt on both tasks, by `compile(optimizer)` and `fit`.

    A batch has "document_ids" [B, L], "document_lengths" [B], "query_ids" [B, T],
    "query_lengths" [B], all int32, and "document_key" [B] int64, B static. `fit`
    reports the mean "loss" and `LOSSES`, in nats a token and a row. Of held-out rows,
    given as `validation_data`, it also reports "gap": by how many nats a token a
    pseudo-query is predicted better from its own document than from that of the row
    before. It is 0 if the decoder never looks at the document.
    """

    def __init__(
        self,
        generator: T5QueryGenerator,
        contrast_weight: float = 1.0,
        scale: float = 20.0,
        seed: int = 0,
    ):
        """Stores the arguments.

        `scale` multiplies the cosines of the contrastive loss; `seed` is of dropout,
        see `T5QueryGenerator.compile`.
        """
        super().__init__(name="pretrainer")
        self._generator = generator
        self._weight, self._seed = contrast_weight, seed
        # The task needs autograph, also in a step that is traced without it.
        self._task = tf.function(tfrs.tasks.Retrieval(temperature=1 / scale))
        self._means = {n: tf.keras.metrics.Mean(n) for n in ("loss", *LOSSES, "gap")}

    def losses_of(
        self, batch: Mapping[str, tf.Tensor], training: bool = True
    ) -> dict[str, tf.Tensor]:
        """Returns `LOSSES` of a batch: [B], and a mean over its rows."""
        states = self._generator.states(batch, training)
        logits = self._generator.head(states["decoder_sequence_output"])
        losses = QueryLoss().call(batch["query_ids"], logits)
        lengths, queries = batch["query_lengths"], batch["query_ids"]
        mask = tf.sequence_mask(lengths, queries.shape[1], tf.int32)
        inputs = {"encoder_token_ids": queries, "encoder_padding_mask": mask}
        encoded = _pooled(self._generator.encoder(inputs, training=training), lengths)
        documents = states["encoder_sequence_output"]
        documents = _of_all_replicas(_pooled(documents, batch["document_lengths"]))
        # Own rows first. Other rows of the same document are no negatives.
        keys = _of_all_replicas(batch["document_key"])
        scored = keys != batch["document_key"][:, tf.newaxis]
        scored |= tf.eye(*scored.shape, dtype=tf.bool)
        total = self._task(encoded, documents, score_mask=scored, compute_metrics=False)
        return dict(zip(LOSSES, (losses, total / queries.shape[0])))

    def train_step(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Takes one step; returns the means of the losses of this epoch."""
        seed = seed_of_step(self._seed, self.optimizer.iterations)
        with tf.GradientTape() as tape, dropout_seed(seed):
            losses = self.losses_of(batch)
            loss = tf.reduce_mean(losses["pseudo_queries"])
            loss += self._weight * losses["contrast"]
            # Gradients are summed over replicas, which have equal shares.
            scaled = loss / self.distribute_strategy.num_replicas_in_sync
        descend(self.optimizer, tape, scaled, self._generator.trainable_variables)
        return self._updated({"loss": loss, **losses})

    def test_step(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Measures held-out rows; see the class."""
        losses = self.losses_of(batch, training=False)
        names = ("document_ids", "document_lengths", "document_key")
        others = {name: tf.roll(batch[name], 1, axis=0) for name in names}
        wrong = self._generator.per_example_losses({**batch, **others})
        gap = wrong - losses["pseudo_queries"]
        return self._updated(
            {**losses, "gap": gap},
            gap=tf.not_equal(batch["document_key"], others["document_key"]),
        )

    def _updated(
        self, values: Mapping[str, tf.Tensor], **weights: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        for name, value in values.items():
            self._means[name].update_state(value, weights.get(name))
        return {name: self._means[name].result() for name in values}


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:7], "big")


def _pooled(states: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """[B, L, D] to unit vectors [B, D]."""
    pooled = _pool(states, tf.sequence_mask(lengths, states.shape[1]))
    return tf.math.l2_normalize(pooled, axis=-1)


def _of_all_replicas(values: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all replicas, this one's first."""
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return values
    before = replica.replica_id_in_sync_group * values.shape[0]
    rows = tf.roll(replica.all_gather(values, axis=0), -before, axis=0)
    count = values.shape[0] * replica.num_replicas_in_sync
    return tf.ensure_shape(rows, [count, *values.shape[1:]])
