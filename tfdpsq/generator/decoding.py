"""Queries for a batch of documents: the whole loop, in one graph.

All shapes are static, so that the loop compiles under XLA, also for a TPU. A batch
whose queries end one after the other would cost as much as its longest query. Once half
of the documents have all their queries, the others therefore continue alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.generator.decoder import MASKED, CachedDecoder, Documents
from tfdpsq.generator.sampling import SamplingConfig, sample

# A step of fewer rows takes hardly less time.
_FEWEST_ROWS = 16
# The CPU's matrix product takes rows in blocks, and rounds a remainder differently: 24
# rows with AVX2 (a remainder of 8 too), 48 with AVX-512 (a remainder of 8 not). Batches
# of a multiple of this number are rounded row by row on both.
ROWS_ROUNDED_ALIKE = 24


class _State(NamedTuple):
    position: tf.Tensor  # scalar int32, the next position to fill
    tokens: tf.Tensor  # [B] int32, the last tokens drawn
    finished: tf.Tensor  # [B] bool
    ids: tf.Tensor  # [T, B] int32
    cache: list[tf.Tensor]


def decodable_logits_mask(
    vocabulary_size: int, decodable: int, never: tuple[int, ...]
) -> tf.Tensor:
    """Makes the mask to add to logits so that only text is drawn.

    Args:
      vocabulary_size: width of the logits, V. T5's 32128 exceed its 32000 pieces.
      decodable: number of leading ids that the tokenizer can decode.
      never: further ids that are not text (padding, unknown).

    Returns:
      [V] float32: 0 where an id may be drawn, -inf elsewhere.

    Raises:
      InputError: the tokenizer has more pieces than the model has logits.
    """
    if decodable > vocabulary_size:
        raise validation.InputError(
            f"the tokenizer has {decodable} pieces but the model only "
            f"{vocabulary_size} logits. Use the vocabulary the model was made with."
        )
    ids = tf.range(vocabulary_size)
    bad = ids >= decodable
    for one in never:
        bad |= ids == one
    return tf.where(bad, float("-inf"), 0.0)


@tf.autograph.experimental.do_not_convert
def generate(
    model: tf.keras.Model,
    document_ids: tf.Tensor,
    document_lengths: tf.Tensor,
    uniforms: tf.Tensor,
    config: SamplingConfig,
    logits_mask: tf.Tensor,
    eos_id: int,
    early_stop: bool = True,
    decoder: CachedDecoder | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Writes k queries for each document; the encoder runs once for all of them.

    A query depends on its own document and its own `uniforms` alone: on a CPU without
    XLA to the last bit of each probability, if L and the number of rows are multiples
    of `ROWS_ROUNDED_ALIKE`; elsewhere up to rounding.

    Args:
      model: a `T5QueryGenerator`.
      document_ids: [D, L] int32.
      document_lengths: [D] int32.
      uniforms: [D·k, T] float32 in [0, 1), static shape: one number per query and
        position, k rows for each document in turn; T is the most tokens a query may
        have. Ignored by greedy decoding.
      config: sampling of tokens.
      logits_mask: [V] float32, from `decodable_logits_mask`.
      eos_id: the token that ends a query. It is never drawn first, as data sets have
        no empty queries.
      early_stop: drop rows that have ended, and stop once all have.
      decoder: a decoder made earlier for this model and T; `None` makes one in every
        call.

    Returns:
      ids [D·k, T] int32, 0 after the end; lengths [D·k] int32, EOS included.

    Raises:
      InputError: the number of rows is not a multiple of the documents.
    """
    rows, length = uniforms.shape
    count = document_ids.shape[0]
    if rows % count:
        raise validation.InputError(
            f"uniforms has {rows} rows for {count} documents; give each document as "
            "many rows as it gets queries."
        )
    # Prompt and document together are padded to a width that rounds the same way.
    prompt = model.backbone.soft_prompt
    if prompt is not None:
        # A width that is not static is a bucket's, a multiple already.
        width = document_ids.shape[1] or 0
        short = -(prompt.length + width) % ROWS_ROUNDED_ALIKE
        document_ids = tf.pad(document_ids, [[0, 0], [0, short]])
    mask = tf.sequence_mask(document_lengths, tf.shape(document_ids)[1], tf.int32)
    decoder = decoder or CachedDecoder(model, length)
    documents = decoder.documents(model.encode(document_ids, mask), mask)
    step = _make_step(decoder, config, logits_mask, eos_id)
    state = _State(
        tf.constant(0),
        tf.zeros([rows], tf.int32),
        tf.zeros([rows], tf.bool),
        tf.zeros([length, rows], tf.int32),
        decoder.empty_cache(rows),
    )
    ids = _run(decoder, step, state, documents, uniforms, early_stop)
    # Padding is never drawn (the mask forbids it), so it marks the end exactly.
    return ids, tf.reduce_sum(tf.cast(ids != 0, tf.int32), axis=1)


def _make_step(decoder: Any, config: Any, logits_mask: Any, eos_id: Any) -> Any:
    not_first = tf.one_hot(eos_id, logits_mask.shape[0], on_value=MASKED)
    # Added to the logits at the first position, and at all others.
    additions = tf.stack([logits_mask + not_first, logits_mask])
    position_bias = decoder.position_bias()

    def step(state: _State, documents: Documents, uniforms: tf.Tensor) -> _State:
        logits, cache = decoder.step(
            state.position, state.tokens, state.cache, documents, position_bias
        )
        logits += additions[tf.minimum(state.position, 1)]
        drawn = sample(logits, uniforms[state.position], config)
        drawn = tf.where(state.finished, 0, drawn)
        ids = tf.tensor_scatter_nd_update(
            state.ids, state.position[None, None], drawn[None]
        )
        finished = state.finished | (drawn == eos_id)
        return _State(state.position + 1, drawn, finished, ids, cache)

    return step


def _run(
    decoder: Any, step: Any, state: Any, documents: Any, uniforms: Any, early_stop: Any
) -> Any:
    """Runs `state` to the end by steps of `_make_step`; returns ids [B, T] int32.

    `uniforms` is [B, T]; `early_stop` says whether rows that have ended are dropped.
    """
    rows, length = uniforms.shape
    count = documents.bias.shape[0]
    samples = rows // count
    multiple = ROWS_ROUNDED_ALIKE // math.gcd(ROWS_ROUNDED_ALIKE, samples)
    fewer = count // 2 // multiple * multiple
    if not early_stop or fewer * samples < _FEWEST_ROWS:
        fewer = 0
    by_position = tf.transpose(uniforms)

    def unfinished(state: Any) -> Any:
        by_document = tf.reshape(state.finished, [count, -1])
        return ~tf.reduce_all(by_document, axis=1)

    def more(*state: Any) -> Any:
        state = _State(*state)
        going_on = state.position < length
        if early_stop:
            left = tf.reduce_sum(tf.cast(unfinished(state), tf.int32))
            going_on &= left > fewer
        return going_on

    def body(*state: Any) -> Any:
        return step(_State(*state), documents, by_position)

    state = _State(*tf.while_loop(more, body, state, maximum_iterations=length))
    ids = tf.transpose(state.ids)
    if not fewer:
        return ids

    def go_on() -> Any:
        left = unfinished(state)
        # Unfinished documents first; some finished ones may fill up the rest.
        order = tf.argsort(tf.cast(~left, tf.int32), stable=True)
        chosen = order[:fewer]
        of_rows = chosen[:, None] * (rows // count) + tf.range(rows // count)
        of_rows = tf.reshape(of_rows, [fewer * (rows // count)])
        part = _State(
            state.position,
            tf.gather(state.tokens, of_rows),
            tf.gather(state.finished, of_rows),
            tf.gather(state.ids, of_rows, axis=1),
            [tf.gather(one, of_rows) for one in state.cache],
        )
        found = _run(
            decoder,
            step,
            part,
            documents.get_rows(chosen),
            tf.gather(uniforms, of_rows),
            early_stop,
        )
        return tf.tensor_scatter_nd_update(ids, of_rows[:, None], found)

    over = (state.position == length) | tf.reduce_all(state.finished)
    return tf.cond(over, lambda: ids, go_on)
