"""Public pretraining of a T5: its rows, its batches, its losses, what is watched.

Three tasks share each batch. *Span corruption* is T5's own. *Pseudo-queries* are
sentences of a document that have to be written from it, mostly after they were cut out.
In the *contrastive* task the encoder has to know the document that a pseudo-query is
from among all of the batch.

A tiny T5 can lower these losses while its encoder maps everything to one point or its
decoder never looks at the document. So the cosines between tokens and between
documents are watched, and how much better a held-out pseudo-query is predicted by its
document than by another one.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdpsq.data import PROMPT, Document, RowStore, Tokenizer, pseudo_pairs
from tfdpsq.generator.decoding import EOS
from tfdpsq.generator.model import QueryLoss, T5QueryGenerator, descend
from tfdpsq.generator.preprocessing import Preprocessor
from tfdpsq.layers import MaskedMeanPooling, dropout_seed
from tfdpsq.layers.seeded_dropout import kinds_of_rows, seed_of_step
from tfdpsq.validation import InputError

# T5 has this many; their ids come after the vocabulary's pieces, the first one last.
SENTINELS = 100
LOSSES = ("pseudo_queries", "spans", "contrast")
_CHUNK = 512
_DENSITY, _MEAN_SPAN = 0.15, 3.0

_pool = MaskedMeanPooling()


def is_held_out(document_id: str, one_in: int = 50) -> bool:
    """Returns whether a document, one in `one_in` by its id's hash, is held out."""
    return _key(document_id) % one_in == 0


def passages(document: Document, words: int) -> Iterator[Document]:
    """Cuts a document, at ends of lines or sentences, into passages.

    A sentence from beyond what the model reads could be neither copied nor
    distinguished.

    Args:
      document: any.
      words: a passage ends once it has this many words; a last one of less than half
        as many stays with the one before.

    Yields:
      Documents whose ids end in "#0", "#1", ...; the first has the title.
    """
    parts, left = [""], len(document.text.split())
    count = 0
    for piece in re.findall(r".*?(?:\n|[.!?]\s+|$)", document.text, re.DOTALL):
        if count >= words and left >= words / 2:
            parts.append("")
            count = 0
        parts[-1] += piece
        count += len(piece.split())
        left -= len(piece.split())
    for number, text in enumerate(parts):
        title = "" if number else document.title
        yield Document(f"{document.id}#{number}", title, text)


def pair_rows(
    documents: Iterable[Document],
    preprocessor: Preprocessor,
    per_passage: int,
    seed: int,
    passage_words: int = 50,
) -> Iterator[dict[str, np.ndarray]]:
    """Pseudo-queries with their passages, as chunks of rows for `write_rows`.

    Args:
      documents: public ones, streamed.
      preprocessor: the model's; its lengths are L and T.
      per_passage: pseudo-queries a passage at most.
      seed: draws which sentences.
      passage_words: see `passages`.

    Yields:
      "document_ids" [n, L], the sentence cut out, and "whole_ids", with it;
      "query_ids" [n, T]; their lengths as "document_lengths", "whole_lengths",
      "query_lengths" [n]; all int32. "document_key" [n] int64 is the same for rows of
      one document.
    """
    for chunk in _chunks(p for d in documents for p in passages(d, passage_words)):
        content = {passage.id: passage.content for passage in chunk}
        pairs = list(pseudo_pairs(chunk, seed, per_passage))
        if not pairs:
            continue
        rows = preprocessor.arrays(pairs)
        rows["whole_ids"], rows["whole_lengths"] = preprocessor.documents(
            content[pair.document_id] for pair in pairs
        )
        keys = [_key(pair.document_id.rpartition("#")[0]) for pair in pairs]
        yield {**rows, "document_key": np.array(keys, np.int64)}


def text_rows(
    documents: Iterable[Document], tokenizer: Tokenizer, length: int
) -> Iterator[dict[str, np.ndarray]]:
    """Documents cut into stretches of tokens, for span corruption.

    Args:
      documents: public ones, streamed.
      tokenizer: the model's.
      length: tokens of a stretch.

    Yields:
      "text_ids" [n, length] int32 padded with 0, "text_lengths" [n] int32.
    """
    for chunk in _chunks(documents):
        rows = [
            ids[start : start + length]
            for ids in tokenizer.pieces([document.content for document in chunk])
            for start in range(0, len(ids), length)
        ]
        padded = np.zeros([len(rows), length], np.int32)
        for place, row in zip(padded, rows):
            place[: len(row)] = row
        lengths = np.array([len(row) for row in rows], np.int32)
        yield {"text_ids": padded, "text_lengths": lengths}


def corrupt_spans(
    ids: np.ndarray,
    input_length: int,
    target_length: int,
    first_sentinel: int,
    random: np.random.Generator,
) -> tuple[np.ndarray, int, np.ndarray, int]:
    """Cuts spans out of a text, to be written (Raffel et al. 2020, section 3.1.4).

    15 % of the tokens are dropped, in spans of 3 on average. Each span is replaced by a
    sentinel of its own; the target is every sentinel followed by what it stands for.

    Args:
      ids: [n] tokens of the text, without EOS.
      input_length: tokens of the input, EOS included; a longer text is cut.
      target_length: tokens of the target, EOS included; spans that it has no room for
        are not cut out.
      first_sentinel: the id of the first span's sentinel; the next ones count down.
      random: draws which spans.

    Returns:
      Input [input_length] int32 padded with 0 and its length; target [target_length]
      int32 padded with 0 and its length. Putting the target's spans in the place of
      the sentinels gives back the text.
    """
    left = iter(ids[: input_length - 1].tolist())
    source: list[int] = []
    target: list[int] = []
    sentinel = first_sentinel
    for kept, dropped in _spans(min(len(ids), input_length - 1), random):
        source += itertools.islice(left, kept)
        span = list(itertools.islice(left, dropped))
        if len(target) + len(span) + 2 <= target_length:
            source.append(sentinel)
            target += [sentinel, *span]
            sentinel -= 1
        else:
            source += span
    source += left
    rows = []
    for tokens, size in ((source, input_length), (target, target_length)):
        row = np.zeros([size], np.int32)
        row[: len(tokens) + 1] = [*tokens, EOS]
        rows += [row, len(tokens) + 1]
    return tuple(rows)


def _spans(length: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """(tokens kept, tokens dropped) in turn, with a random cut of each sum."""
    if length < 2:
        return []
    dropped = min(max(1, round(length * _DENSITY)), length - 1)
    # At least one token is kept before each span, so that spans stay apart.
    most = min(dropped, length - dropped, SENTINELS)
    spans = min(max(1, round(dropped / _MEAN_SPAN)), most)
    kept = _composition(length - dropped, spans + 1, random)
    return list(zip(kept, _composition(dropped, spans, random)))


def _composition(total: int, parts: int, random: np.random.Generator) -> list[int]:
    """A uniformly drawn way to write `total` as a sum of `parts` positive numbers.

    The last one may be 0 where there are not enough for all.
    """
    if total < parts:
        return [1] * total + [0] * (parts - total)
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).tolist()


class Batches:
    """The batches of pretraining, each a function of the seed and its number alone."""

    def __init__(
        self,
        pairs: RowStore,
        texts: RowStore,
        tokenizer: Tokenizer,
        embeddings: int,
        pair_rows: int,
        text_rows: int,
        seed: int,
        whole: float = 0.15,
        bare: float = 0.5,
    ):
        """Stores the arguments.

        Args:
          pairs: rows of `pair_rows`.
          texts: rows of `text_rows`.
          tokenizer: the model's.
          embeddings: how many the model has.
          pair_rows: pseudo-queries in a batch.
          text_rows: texts with spans cut out in a batch.
          seed: any integer.
          whole: share of the pseudo-queries whose document still holds them.
          bare: share of the documents without prompt, as a retriever reads them.

        Raises:
          InputError: the model has no embeddings for the sentinels.
        """
        if tokenizer.vocabulary_size + SENTINELS > embeddings:
            raise InputError(
                f"the model has {embeddings} embeddings, and needs {SENTINELS} for "
                f"sentinels after the {tokenizer.vocabulary_size} pieces of its "
                "vocabulary. Make one with more, or give a smaller vocabulary."
            )
        self._pairs, self._texts = pairs, texts
        self._counts = pair_rows, text_rows
        self._first_sentinel = tokenizer.vocabulary_size + SENTINELS - 1
        self._prompt = tokenizer.pieces([PROMPT.strip()])[0]
        self._seed, self._whole, self._bare = seed, whole, bare

    def __call__(self, number: int, share: int = 0, of: int = 1) -> dict[str, Any]:
        """The batch of a step.

        Args:
          number: the step, from 0.
          share: the number of a replica, from 0.
          of: the number of replicas, which divides both kinds of rows.

        Returns:
          What `Pretrainer` reads: the replica's share of the pseudo-queries, then its
          share of the texts.
        """
        random = np.random.default_rng([self._seed, number])
        pairs, texts = self._counts
        drawn = self._pairs.take(random.integers(len(self._pairs), size=pairs))
        whole = random.random(pairs) < self._whole
        ids = np.where(whole[:, np.newaxis], drawn["whole_ids"], drawn["document_ids"])
        lengths = np.where(whole, drawn["whole_lengths"], drawn["document_lengths"])
        self._undress(ids, lengths, random.random(pairs) < self._bare)
        stretches = self._texts.take(random.integers(len(self._texts), size=texts))
        sizes = ids.shape[1], drawn["query_ids"].shape[1]
        made = [
            corrupt_spans(row[:length], *sizes, self._first_sentinel, random)
            for row, length in zip(stretches["text_ids"], stretches["text_lengths"])
        ]
        first = (ids, lengths, drawn["query_ids"], drawn["query_lengths"])
        names = ("document_ids", "document_lengths", "query_ids", "query_lengths")
        batch = {
            name: np.concatenate(
                [
                    np.split(one, of)[share],
                    np.split(np.array(other, np.int32), of)[share],
                ]
            )
            for name, one, other in zip(names, first, zip(*made))
        }
        return {**batch, "document_key": np.split(drawn["document_key"], of)[share]}

    def _undress(self, ids: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> None:
        """Takes the prompt off some rows, in place."""
        size = len(self._prompt)
        rows &= (ids[:, :size] == self._prompt).all(axis=1)
        ids[rows, :-size] = ids[rows, size:]
        ids[rows, -size:] = 0
        lengths[rows] -= size

    def dataset(self, first: int, steps: int) -> tf.data.Dataset:
        """Returns the batches for `Pretrainer.fit`, in the scope that it runs in.

        Args:
          first: the step to go on at; see `steps_in`.
          steps: all steps.
        """

        def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            count = context.num_replicas_in_sync
            own = count // context.num_input_pipelines
            replicas = range(own * context.input_pipeline_id, count)[:own]

            def shares() -> Iterator[dict[str, Any]]:
                for step in range(first, steps):
                    for replica in replicas:
                        yield self(step, replica, count)

            signature = {
                name: tf.TensorSpec(value.shape, value.dtype)
                for name, value in self(0, 0, count).items()
            }
            dataset = tf.data.Dataset.from_generator(shares, output_signature=signature)
            return dataset.prefetch(2)

        strategy = tf.distribute.get_strategy()
        return strategy.distribute_datasets_from_function(of_worker)


def steps_in(backup: str | os.PathLike) -> int:
    """Returns the steps in a directory of `BackupAndRestore`, 0 where there is none.

    Keras goes on with the state and the counters, but not with the data.
    """
    latest = tf.train.latest_checkpoint(os.path.join(backup, "chief"))
    name = "ckpt_saved_batch/.ATTRIBUTES/VARIABLE_VALUE"
    return 0 if latest is None else int(tf.train.load_variable(latest, name)) + 1


class Pretrainer(tf.keras.Model):
    """Trains a T5 on the three tasks, by `compile(optimizer)` and `fit`.

    A batch has "document_ids" [B, L], "document_lengths" [B], "query_ids" [B, T],
    "query_lengths" [B], all int32; "document_key" [P] int64 of the first P < B rows,
    which are pseudo-queries. The loss of the first two tasks is a mean over all rows.

    Attributes:
      generator: what is trained.
      means: the mean "loss" and `LOSSES` since somebody reset them.
    """

    def __init__(
        self,
        generator: T5QueryGenerator,
        contrast_weight: float = 1.0,
        scale: float = 20.0,
        seed: int = 0,
    ):
        """Stores the arguments.

        Args:
          generator: what is trained.
          contrast_weight: weight of the contrastive loss.
          scale: what its cosines are multiplied by.
          seed: of dropout, see `T5QueryGenerator.compile`.
        """
        super().__init__(name="pretrainer")
        self.generator = generator
        self._weight, self._scale, self._seed = contrast_weight, scale, seed
        self._task = tfrs.tasks.Retrieval(temperature=1 / scale)
        self.means = [tf.keras.metrics.Mean(name) for name in ("loss", *LOSSES)]

    def losses_of(
        self, batch: Mapping[str, tf.Tensor], training: bool = True
    ) -> dict[str, tf.Tensor]:
        """Computes the three tasks' losses from one pass, and one over the queries.

        Args:
          batch: see the class.
          training: whether dropout is on.

        Returns:
          `LOSSES`: scalars in nats (a token, a token, a row).
        """
        pairs, rows = batch["document_key"].shape[0], batch["query_ids"].shape[0]
        # In a share of a batch, too, the pseudo-queries come first.
        with kinds_of_rows((pairs, rows - pairs)):
            states = self.generator.states(batch, training)
        logits = self.generator.head(states["decoder_sequence_output"])
        losses = QueryLoss().call(batch["query_ids"], logits)
        queries = _embed(
            self.generator,
            batch["query_ids"][:pairs],
            batch["query_lengths"][:pairs],
            training,
        )
        documents = _pooled(
            states["encoder_sequence_output"][:pairs], batch["document_lengths"][:pairs]
        )
        # Own rows first. Other rows of the same document are no negatives.
        keys = _of_all_replicas(batch["document_key"])
        mask = keys != batch["document_key"][:, tf.newaxis]
        mask |= tf.eye(pairs, keys.shape[0], dtype=tf.bool)
        contrast = self._task(
            queries, _of_all_replicas(documents), score_mask=mask, compute_metrics=False
        )
        values = tf.reduce_mean(losses[:pairs]), tf.reduce_mean(losses[pairs:])
        return dict(zip(LOSSES, (*values, contrast / pairs)))

    def train_step(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Takes one step; returns the means of the losses since they were reset."""
        pairs, rows = batch["document_key"].shape[0], batch["query_ids"].shape[0]
        seed = seed_of_step(self._seed, self.optimizer.iterations)
        with tf.GradientTape() as tape, dropout_seed(seed):
            losses = self.losses_of(batch)
            loss = losses["pseudo_queries"] * pairs + losses["spans"] * (rows - pairs)
            loss = loss / rows + self._weight * losses["contrast"]
            # Gradients are summed over replicas, which have equal shares.
            scaled = loss / self.distribute_strategy.num_replicas_in_sync
        descend(self.optimizer, tape, scaled, self.generator.trainable_variables)
        for mean, value in zip(self.means, (loss, *losses.values())):
            mean.update_state(value)
        return {mean.name: mean.result() for mean in self.means}

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """None: `fit` would reset the means that `BackupAndRestore` has restored."""
        return []


def watcher(
    generator: T5QueryGenerator, rows: Mapping[str, np.ndarray], batch_size: int = 64
) -> Callable[[], dict[str, float]]:
    """Returns a function that measures what the loss hides, on held-out public rows.

    Args:
      generator: what is trained.
      rows: n ≥ 2 of `pair_rows`, of several documents.
      batch_size: rows at a time.

    Returns:
      A function that returns "token_cosine": mean cosine between the encoder's states
      of any two tokens, within and across documents; "document_cosine": the same of
      pooled documents; "own_loss" and "wrong_loss": of the pseudo-queries, nats a
      token, given their own document without them, and another one; "gap": the second
      less the first; "first": share of the pseudo-queries whose own document is nearest
      of all n.

    Raises:
      InputError: all rows are of one document.
    """
    keys = rows["document_key"]
    if (keys == keys[0]).all():
        raise InputError(
            f"all {len(keys)} held-out rows are of one document; pretraining needs "
            "hundreds of documents."
        )
    # The next row, in the order of rows, of another document.
    after = np.arange(len(keys)) + 1
    while (same := keys[after % len(keys)] == keys).any():
        after += same
    wrong = {
        n: rows[n][after % len(keys)] for n in ("document_ids", "document_lengths")
    }

    @tf.function(reduce_retracing=True, autograph=False)
    def measure(batch: Any, wrong: Any) -> Any:
        states = generator.states(batch)["encoder_sequence_output"]
        tokens = tf.boolean_mask(
            tf.math.l2_normalize(states, -1),
            tf.sequence_mask(batch["document_lengths"], states.shape[1]),
        )
        return {
            "own": generator.per_example_losses(batch),
            "wrong": generator.per_example_losses({**batch, **wrong}),
            "queries": _embed(generator, batch["query_ids"], batch["query_lengths"]),
            "documents": _pooled(states, batch["document_lengths"]),
            "tokens": tf.reduce_sum(tokens, 0, keepdims=True),
            "count": tf.shape(tokens)[:1],
        }

    def run() -> dict[str, float]:
        names = ("document_ids", "document_lengths", "query_ids", "query_lengths")
        parts = []
        for start in range(0, len(keys), batch_size):
            at = slice(start, start + batch_size)
            batch = {name: tf.constant(rows[name][at]) for name in names}
            others = {name: tf.constant(values[at]) for name, values in wrong.items()}
            parts.append(tf.nest.map_structure(np.asarray, measure(batch, others)))
        found = {
            name: np.concatenate([part[name] for part in parts]) for name in parts[0]
        }
        nearest = keys[(found["queries"] @ found["documents"].T).argmax(1)]
        own, other = (float(found[name].mean()) for name in ("own", "wrong"))
        return {
            "token_cosine": _mean_cosine(found["tokens"], int(found["count"].sum())),
            "document_cosine": _mean_cosine(found["documents"], len(keys)),
            "own_loss": own,
            "wrong_loss": other,
            "gap": other - own,
            "first": float(np.mean(nearest == keys)),
        }

    return run


def _mean_cosine(parts: np.ndarray, count: int) -> float:
    """Averages over all pairs of `count` different unit vectors, from partial sums."""
    total = parts.sum(0, dtype=np.float64)
    return float((total @ total - count) / (count * (count - 1)))


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:7], "big")


def _embed(model: Any, ids: Any, lengths: Any, training: bool = False) -> tf.Tensor:
    mask = tf.sequence_mask(lengths, ids.shape[1], tf.int32)
    states = model.encoder(
        {"encoder_token_ids": ids, "encoder_padding_mask": mask}, training=training
    )
    # A soft prompt's states come first.
    return _pooled(states[:, -ids.shape[1] :], lengths)


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


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    stream = iter(documents)
    return iter(lambda: list(itertools.islice(stream, _CHUNK)), [])
