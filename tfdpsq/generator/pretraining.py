"""Public pretraining of a T5: its rows, its losses, and what a loss curve hides.

Three tasks share each batch. *Span corruption* (`span_corruption`) is T5's own.
*Pseudo-queries* are sentences of a document that have to be written from it, mostly
after they were cut out. In the *contrastive* task the encoder has to know the document
that a pseudo-query is from among all of the batch.

A tiny T5 can lower these losses while its encoder maps everything to one point or its
decoder never looks at the document. So the cosines between tokens and between
documents are watched, and how much better a held-out pseudo-query is predicted by its
document than by another one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.data import PROMPT, Document, RowStore, Tokenizer, pseudo_pairs
from tfdpsq.data.tokenization import encode_all
from tfdpsq.generator.model import T5QueryGenerator, losses_from_logits
from tfdpsq.generator.passages import document_of, passages
from tfdpsq.generator.span_corruption import SENTINELS, corrupt_spans
from tfdpsq.layers import MaskedMeanPooling
from tfdpsq.layers.seeded_dropout import kinds_of_rows
from tfdpsq.validation import InputError

# Query embeddings [B, D], document embeddings [B, D], document keys [B] to [B] losses.
Contrast = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]

_CHUNK = 512

_pool = MaskedMeanPooling()


def is_held_out(document_id: str, one_in: int = 50) -> bool:
    """Returns whether a document is held out: one in so many, by its id's hash."""
    return _key(document_id) % one_in == 0


def pair_rows(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    document_length: int,
    query_length: int,
    per_passage: int,
    seed: int,
    passage_words: int = 50,
) -> Iterator[dict[str, np.ndarray]]:
    """Pseudo-queries with their passages, as chunks of rows for `write_rows`.

    Documents are cut into passages that the model reads whole: a sentence from beyond
    what it reads could be neither copied nor distinguished.

    Args:
      documents: public ones, streamed.
      tokenizer: the model's.
      document_length: tokens kept of prompt and document, EOS included.
      query_length: tokens kept of the pseudo-query, EOS included.
      per_passage: pseudo-queries a passage at most.
      seed: draws which sentences.
      passage_words: see `passages`.

    Yields:
      "document_ids" [n, document_length], the sentence cut out, and "whole_ids", with
      it; "query_ids" [n, query_length]; their lengths as "document_lengths",
      "whole_lengths", "query_lengths" [n]; all int32. "document_key" [n] int64 is the
      same for rows of one document.
    """
    for chunk in _chunks(p for d in documents for p in passages(d, passage_words)):
        whole = {passage.id: passage.content for passage in chunk}
        pairs = list(pseudo_pairs(chunk, seed, per_passage))
        if not pairs:
            continue
        rows = {}
        for name, texts, length in (
            ("document", [PROMPT + pair.document for pair in pairs], document_length),
            ("whole", [PROMPT + whole[p.document_id] for p in pairs], document_length),
            ("query", [pair.query for pair in pairs], query_length),
        ):
            ids, lengths = encode_all(tokenizer.encode, texts, length)
            rows[f"{name}_ids"], rows[f"{name}_lengths"] = ids, lengths
        rows["document_key"] = np.array(
            [_key(document_of(pair.document_id)) for pair in pairs], np.int64
        )
        yield rows


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
        rows = []
        for ids in tokenizer.pieces([document.content for document in chunk]):
            for start in range(0, len(ids), length):
                rows.append(ids[start : start + length])
        yield {
            "text_ids": np.array(
                [np.pad(row, (0, length - len(row))) for row in rows], np.int32
            ).reshape([-1, length]),
            "text_lengths": np.array([len(row) for row in rows], np.int32),
        }


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
        whole: float = 0.3,
        bare: float = 0.5,
    ):
        """Takes what to draw from.

        Args:
          pairs: what `pair_rows` made.
          texts: what `text_rows` made.
          tokenizer: the model's.
          embeddings: how many the model has; the sentinels come after the
            vocabulary's pieces.
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
        self._eos = tokenizer.eos_id
        prompt, length = tokenizer.encode([PROMPT.strip()], 64)
        self._prompt = np.asarray(prompt)[0, : int(length[0]) - 1]
        self._seed, self._whole, self._bare = seed, whole, bare

    def __call__(self, number: int) -> dict[str, np.ndarray]:
        """The batch of a step.

        Args:
          number: the step, from 0.

        Returns:
          What `pretraining_losses` reads; the pseudo-queries come first.
        """
        random = np.random.default_rng([self._seed, number])
        pairs, texts = self._counts
        drawn = self._pairs.take(random.integers(len(self._pairs), size=pairs))
        whole = random.random(pairs) < self._whole
        ids = np.where(whole[:, np.newaxis], drawn["whole_ids"], drawn["document_ids"])
        lengths = np.where(whole, drawn["whole_lengths"], drawn["document_lengths"])
        self._undress(ids, lengths, random.random(pairs) < self._bare)
        stretches = self._texts.take(random.integers(len(self._texts), size=texts))
        made = [
            corrupt_spans(
                row,
                length,
                ids.shape[1],
                drawn["query_ids"].shape[1],
                self._first_sentinel,
                random,
                self._eos,
            )
            for row, length in zip(stretches["text_ids"], stretches["text_lengths"])
        ]
        sources, source_lengths, targets, target_lengths = (
            np.array(part, np.int32) for part in zip(*made)
        )
        return {
            "document_ids": np.concatenate([ids, sources]),
            "document_lengths": np.concatenate([lengths, source_lengths]),
            "query_ids": np.concatenate([drawn["query_ids"], targets]),
            "query_lengths": np.concatenate([drawn["query_lengths"], target_lengths]),
            "document_key": drawn["document_key"],
        }

    def _undress(self, ids: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> None:
        """Takes the prompt off some rows, in place."""
        size = len(self._prompt)
        rows &= (ids[:, :size] == self._prompt).all(axis=1)
        ids[rows, :-size] = ids[rows, size:]
        ids[rows, -size:] = 0
        lengths[rows] -= size


def pretraining_losses(
    model: T5QueryGenerator,
    batch: Mapping[str, tf.Tensor],
    contrast: Contrast,
    training: bool = True,
) -> dict[str, tf.Tensor]:
    """The three tasks' losses from one pass of the model, and one over the queries.

    Args:
      model: what is trained.
      batch: "document_ids" [B, L], "document_lengths" [B], "query_ids" [B, T],
        "query_lengths" [B], all int32; "document_key" [P] int64 of the first P ≤ B
        rows, which are pseudo-queries.
      contrast: the contrastive loss of pooled, normalised encoder states.
      training: whether dropout is on.

    Returns:
      "pseudo_queries", "spans" and "contrast": scalars in nats (a token, a token, a
      row).
    """
    pairs, rows = batch["document_key"].shape[0], batch["query_ids"].shape[0]
    # In a share of a batch, too, the pseudo-queries come first.
    with kinds_of_rows((pairs, rows - pairs)):
        states = model.states(batch, training)
    losses = losses_from_logits(model.head(states["decoder_sequence_output"]), batch)
    queries = _embed(
        model, batch["query_ids"][:pairs], batch["query_lengths"][:pairs], training
    )
    documents = _pooled(
        states["encoder_sequence_output"][:pairs], batch["document_lengths"][:pairs]
    )
    return {
        "pseudo_queries": tf.reduce_mean(losses[:pairs]),
        "spans": tf.reduce_mean(losses[pairs:]),
        "contrast": tf.reduce_mean(contrast(queries, documents, batch["document_key"])),
    }


class Watcher:
    """Measures what the loss hides, on held-out public rows."""

    def __init__(
        self,
        model: T5QueryGenerator,
        rows: Mapping[str, np.ndarray],
        batch_size: int = 64,
    ):
        """Takes model and rows; nothing is run.

        Args:
          model: what is trained.
          rows: of `pair_rows`; n ≥ 2 of them, of several documents.
          batch_size: rows at a time.

        Raises:
          InputError: all rows are of one document.
        """
        self._rows, self._size = rows, batch_size
        self._wrong = _others(rows["document_key"])

        @tf.function(reduce_retracing=True, autograph=False)
        def measure(batch: Any, wrong_ids: Any, wrong_lengths: Any) -> Any:
            states = model.states(batch)
            logits = model.head(states["decoder_sequence_output"])
            encoded = states["encoder_sequence_output"]
            lengths = batch["document_lengths"]
            tokens = tf.boolean_mask(
                tf.math.l2_normalize(encoded, -1),
                tf.sequence_mask(lengths, encoded.shape[1]),
            )
            wrong = {
                **batch,
                "document_ids": wrong_ids,
                "document_lengths": wrong_lengths,
            }
            return {
                "own": losses_from_logits(logits, batch),
                "wrong": model.per_example_losses(wrong),
                "queries": _embed(model, batch["query_ids"], batch["query_lengths"]),
                "documents": _pooled(encoded, lengths),
                "token_sum": tf.reduce_sum(tokens, 0, keepdims=True),
                "tokens": tf.shape(tokens)[:1],
            }

        self._measure = measure

    def __call__(self) -> dict[str, float]:
        """Measures.

        Returns:
          "token_cosine": mean cosine between the encoder's states of any two tokens,
          within and across documents; "document_cosine": the same of pooled documents;
          "own_loss" and "wrong_loss": of the pseudo-queries, nats a token, given their
          own document without them, and another one; "gap": the second less the first;
          "first": share of the pseudo-queries whose own document is nearest of all n.
        """
        names = ("document_ids", "document_lengths", "query_ids", "query_lengths")
        keys = self._rows["document_key"]
        parts: dict[str, list[np.ndarray]] = {}
        for start in range(0, len(keys), self._size):
            at = slice(start, start + self._size)
            batch = {name: tf.constant(self._rows[name][at]) for name in names}
            others = (tf.constant(self._rows[n][self._wrong[at]]) for n in names[:2])
            for name, value in self._measure(batch, *others).items():
                parts.setdefault(name, []).append(value.numpy())
        found = {name: np.concatenate(part) for name, part in parts.items()}
        documents = found["documents"]
        nearest = keys[(found["queries"] @ documents.T).argmax(1)]
        own, wrong = (float(found[name].mean()) for name in ("own", "wrong"))
        return {
            "token_cosine": _mean_cosine(
                found["token_sum"].sum(0, dtype=np.float64), int(found["tokens"].sum())
            ),
            "document_cosine": _mean_cosine(
                documents.sum(0, dtype=np.float64), len(documents)
            ),
            "own_loss": own,
            "wrong_loss": wrong,
            "gap": wrong - own,
            "first": float(np.mean(nearest == keys)),
        }


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:7], "big")


def _mean_cosine(total: np.ndarray, count: int) -> float:
    """Averages over all pairs of different unit vectors, from their sum."""
    return float((total @ total - count) / (count * (count - 1)))


def _others(keys: np.ndarray) -> np.ndarray:
    """For each row the next one, in the order of rows, of another document."""
    n = len(keys)
    others = np.full([n], -1)
    for shift in range(1, n):
        ahead = (np.arange(n) + shift) % n
        others = np.where((others < 0) & (keys[ahead] != keys), ahead, others)
        if (others >= 0).all():
            return others
    raise InputError(
        f"all {n} held-out rows are of one document; pretraining needs hundreds of "
        "documents."
    )


def _embed(model: Any, ids: Any, lengths: Any, training: bool = False) -> tf.Tensor:
    mask = tf.sequence_mask(lengths, ids.shape[1], tf.int32)
    states = model.encoder(
        {"encoder_token_ids": ids, "encoder_padding_mask": mask}, training=training
    )
    # A soft prompt's states come first.
    return _pooled(states[:, -ids.shape[1] :], lengths)


def _pooled(states: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """[B, L, D] to unit vectors [B, D]."""
    return tf.math.l2_normalize(
        _pool(states, tf.sequence_mask(lengths, states.shape[1])), axis=-1
    )


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    stream = iter(documents)
    return iter(lambda: list(itertools.islice(stream, _CHUNK)), [])
