"""Generators for CTranslate2, which serves a T5 without TensorFlow.

`save` fills CTranslate2's own description of a Transformer with a checkpoint's weights,
by numpy: neither torch nor transformers is needed. `compare` runs what was written next
to our model and says how near the two are; a wrong conversion is refused.

    translator = ctranslate2.Translator(directory)
    pieces = processor.encode("generate_query: " + document, out_type=str) + ["</s>"]
    translator.translate_batch(
        [pieces], beam_size=1, sampling_topk=0, sampling_topp=0.8
    )

Source: github.com/OpenNMT/CTranslate2, python/ctranslate2/specs and converters.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data.tokenization import VOCABULARY_FILE, Tokenizer
from tfdpsq.generator.checkpoints import prompt_file, weights
from tfdpsq.generator.checkpoints import slots as t5_slots
from tfdpsq.generator.checkpoints.checkpoint import Checkpoint
from tfdpsq.generator.model import T5QueryGenerator
from tfdpsq.generator.sampling import SamplingConfig
from tfdpsq.layers import T5Config

DTYPES = ("float32", "int8")
# Largest distance that has a bucket of its own, in every T5.
_MAX_DISTANCE = 128
# Most nats by which a token's log-probability may differ, on average: rounding makes
# 2e-6 in float32, and 0.02 in int8. And the smallest share of equal tokens: decoding
# step by step must not differ either, but in int8 one token changes all after it.
_MOST_NATS = {"float32": 1e-3, "int8": 0.1}
_FEWEST_SAME = {"float32": 0.9, "int8": 0.0}


def check_options(dtype: str, encoder_only: bool) -> None:
    """Refuses what `save` cannot write.

    Raises:
      InputError: an unknown dtype, an encoder alone, or CTranslate2 is not installed.
    """
    validation.one_of("dtype", dtype, DTYPES)
    if encoder_only:
        raise validation.InputError(
            "encoder_only is True, but CTranslate2 runs a whole T5. Leave it False."
        )
    library()


def library() -> Any:
    """Returns the module ctranslate2, with its `specs`.

    Raises:
      InputError: it is not installed.
    """
    remedy = (
        "the format ctranslate2 needs the package ctranslate2, which is not "
        "installed. Run pip install 'tfdpsq[ctranslate2]'."
    )
    validation.library("ctranslate2.specs", remedy)
    return validation.library("ctranslate2", remedy)


def save(
    directory: str | os.PathLike,
    config: T5Config,
    model: tf.keras.Model | Checkpoint,
    dtype: str = "float32",
    vocabulary: str | os.PathLike | None = None,
    encoder_only: bool = False,
) -> None:
    """Writes a model for `ctranslate2.Translator`, with all its weights in memory once.

    Arguments are those of `huggingface.save`; `dtype` is one of `DTYPES`, int8 with one
    scale for each row of a matrix.

    Raises:
      InputError: see `check_options`; or no vocabulary was given, the model has a soft
        prompt, or a weight is not finite.
    """
    check_options(dtype, encoder_only)
    prompt_file.refuse(model, "a CTranslate2 model")
    if vocabulary is None:
        raise validation.InputError(
            "no vocabulary was found, and CTranslate2 reads and writes pieces of text. "
            "Give the SentencePiece model with --vocabulary."
        )
    pieces = _pieces(vocabulary, config.vocabulary_size)
    write_model(directory, config, model, dtype, pieces)
    shutil.copyfile(vocabulary, pathlib.Path(directory) / VOCABULARY_FILE)


def write_model(
    directory: str | os.PathLike,
    config: T5Config,
    model: tf.keras.Model | Checkpoint,
    dtype: str,
    pieces: Sequence[str],
) -> None:
    """Writes a model whose pieces have these names, padding, EOS and unknown first."""
    spec = _filled(config, lambda slot: _stored(model, slot))
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    own = spec.config
    own.bos_token, own.eos_token, own.unk_token = pieces[:3]
    own.decoder_start_token = pieces[0]
    spec.validate()
    spec.optimize(quantization=dtype)
    spec.save(os.fspath(directory))


def compare(
    directory: str | os.PathLike,
    model: T5QueryGenerator,
    dtype: str,
    texts: Sequence[str],
    document_length: int = 128,
    query_length: int = 24,
) -> dict[str, Any]:
    """Compares what `save` wrote with the model it was made from.

    Both write a query for each text by greedy decoding. Then both score ours, token by
    token, so that one token that differs does not change all that follow it.

    Args:
      directory: `save` wrote it, with the vocabulary.
      model: the generator.
      dtype: the one it was saved in.
      texts: public texts, the prompt included.
      document_length: tokens of a text, at most.
      query_length: tokens of a query, at most.

    Returns:
      "queries" and "tokens" compared, "same_tokens", the share of the tokens of ours
      that CTranslate2 writes in the same place, "same_queries", and the "mean" and
      "largest" of "log_probability_difference", in nats a token.

    Raises:
      InputError: they differ by more than rounding to `dtype` explains.
    """
    vocabulary = pathlib.Path(directory) / VOCABULARY_FILE
    tokenizer = Tokenizer(vocabulary)
    pieces = _pieces(vocabulary, model.config.vocabulary_size)
    ids, lengths = (t.numpy() for t in tokenizer.encode(texts, document_length))
    greedy = SamplingConfig(temperature=0.0)
    written = model.generate(ids, query_length, tokenizer=tokenizer, sampling=greedy)
    ours = np.asarray(written)
    translator = library().Translator(os.fspath(directory), intra_threads=_threads())
    sources = [[pieces[i] for i in row[:n]] for row, n in zip(ids, lengths)]
    silent = [tokenizer.pad_id, tokenizer.unk_id]
    silent += range(tokenizer.vocabulary_size, model.config.vocabulary_size)
    numbers = {piece: i for i, piece in enumerate(pieces)}
    theirs = np.zeros_like(ours)
    for row, found in enumerate(
        translator.translate_batch(
            sources,
            beam_size=1,
            max_decoding_length=query_length,
            return_end_token=True,
            suppress_sequences=[[pieces[i]] for i in silent],
        )
    ):
        hypothesis = [numbers[piece] for piece in found.hypotheses[0]]
        theirs[row, : len(hypothesis)] = hypothesis
    real = ours != tokenizer.pad_id
    difference = _score_differences(
        translator, model, tokenizer, (sources, ids, lengths), ours, pieces
    )
    same = float((theirs == ours)[real].mean())
    result = {
        "queries": len(ours),
        "tokens": int(real.sum()),
        "same_tokens": same,
        "same_queries": float((theirs == ours).all(axis=1).mean()),
        "log_probability_difference": {
            "mean": float(difference.mean()),
            "largest": float(difference.max()),
        },
    }
    near = difference.mean() <= _MOST_NATS[dtype]
    if not (near and same >= _FEWEST_SAME[dtype]):
        raise validation.InputError(
            "what CTranslate2 runs differs from the model by "
            f"{difference.mean():.3g} nats a token (at most {_MOST_NATS[dtype]:g} in "
            f"{dtype}) and writes {same:.1%} of its tokens (at least "
            f"{_FEWEST_SAME[dtype]:.0%}). "
            + (
                "Use float32: on processors without VNNI, int8 sums may overflow."
                if dtype != "float32"
                else "Use another format."
            )
        )
    return result


def _score_differences(
    translator: Any, model: Any, tokenizer: Any, documents: Any, ours: Any, pieces: Any
) -> Any:
    """Returns |ours - theirs| of the log-probability of every token of our queries."""
    sources, ids, lengths = documents
    # CTranslate2 adds the EOS, so what was cut off without one gets it here, too.
    targets = [
        [i for i in row if i not in (tokenizer.pad_id, tokenizer.eos_id)]
        for row in ours
    ]
    width = max(map(len, targets)) + 1
    queries = np.zeros([len(ours), width], np.int32)
    for row, target in zip(queries, targets):
        row[: len(target) + 1] = [*target, tokenizer.eos_id]
    counts = np.array([len(target) + 1 for target in targets], np.int32)
    logits = model(
        {
            "document_ids": tf.constant(ids),
            "document_lengths": tf.constant(lengths),
            "query_ids": tf.constant(queries),
            "query_lengths": tf.constant(counts),
        }
    )
    found = tf.gather(tf.nn.log_softmax(logits), queries, batch_dims=2).numpy()
    scored = translator.score_batch(
        sources, [[pieces[i] for i in target] for target in targets]
    )
    return np.concatenate(
        [
            np.abs(np.asarray(result.log_probs) - row[:count])
            for result, row, count in zip(scored, found, counts)
        ]
    )


def _filled(config: T5Config, value: Callable[[t5_slots.Slot], np.ndarray]) -> Any:
    """Returns CTranslate2's description of a T5, with the weights of `value`."""
    specs = library().specs
    gated = config.version != "1.0"
    spec = specs.TransformerSpec.from_config(
        config.num_layers,
        config.num_heads,
        pre_norm=True,
        activation=specs.Activation.GELUTanh if gated else specs.Activation.RELU,
        ffn_glu=gated,
        relative_attention_bias=True,
        rms_norm=True,
    )
    slots = {slot.name: slot for slot in t5_slots.slots(config)}

    def read(name: str) -> np.ndarray:
        return value(slots[f"{name}.weight"])

    shared = read("shared")
    for side, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        embeddings = stack.embeddings
        first = embeddings[0] if isinstance(embeddings, list) else embeddings
        first.weight = shared
        stack.scale_embeddings = False
        stack.layer_norm.gamma = read(f"{side}.final_layer_norm")
        positions = read(
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        )
        for number, layer in enumerate(stack.layer):
            block = f"{side}.block.{number}.layer"
            own = layer.self_attention
            _attention(own, f"{block}.0", "SelfAttention", read)
            own.relative_attention_bias = positions
            own.relative_attention_max_distance = np.int32(_MAX_DISTANCE)
            last = f"{block}.1"
            if side == "decoder":
                _attention(layer.attention, last, "EncDecAttention", read)
                last = f"{block}.2"
            feed = f"{last}.DenseReluDense"
            layer.ffn.layer_norm.gamma = read(f"{last}.layer_norm")
            layer.ffn.linear_0.weight = read(f"{feed}.wi_0" if gated else f"{feed}.wi")
            if gated:
                layer.ffn.linear_0_noact.weight = read(f"{feed}.wi_1")
            layer.ffn.linear_1.weight = read(f"{feed}.wo")
    spec.decoder.projection.weight = shared if config.tied else read("lm_head")
    if config.tied:
        spec.decoder.scale_outputs = np.float32(config.hidden_dim**-0.5)
    return spec


def _attention(
    spec: Any, place: str, title: str, read: Callable[[str], np.ndarray]
) -> None:
    """Fills in an attention; those of one input are one matrix."""
    query, key, value = (read(f"{place}.{title}.{letter}") for letter in "qkv")
    spec.queries_scale = 1.0  # T5 has no 1/√d
    if title == "SelfAttention":
        spec.linear[0].weight = np.concatenate([query, key, value])
    else:
        spec.linear[0].weight = query
        spec.linear[1].weight = np.concatenate([key, value])
    spec.linear[-1].weight = read(f"{place}.{title}.o")
    spec.layer_norm.gamma = read(f"{place}.layer_norm")


def _stored(model: tf.keras.Model | Checkpoint, slot: t5_slots.Slot) -> np.ndarray:
    """Reads a weight, matrices as [out, in]."""
    value = np.concatenate(list(weights.stored_blocks(model, slot)))
    turned = slot.kind in (t5_slots.KERNEL, t5_slots.HEAD)
    return np.ascontiguousarray(value.T if turned else value)


def _pieces(vocabulary: str | os.PathLike, size: int) -> list[str]:
    """Returns a name for each of the model's embeddings, no two of them the same."""
    processor = sentencepiece.SentencePieceProcessor(model_file=os.fspath(vocabulary))
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    return pieces + [f"<no_piece_{i}>" for i in range(len(pieces), size)]


def _threads() -> int:
    return len(os.sched_getaffinity(0))
