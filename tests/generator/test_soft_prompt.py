"""A generator with a soft prompt: the same as with words of its own, and kept whole."""

import functools
import json

import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from helpers import attentive

from tfdpsq.data import Document, train_vocabulary
from tfdpsq.data.tokenization import Tokenizer
from tfdpsq.generator import (
    SamplingConfig,
    SynthesisConfig,
    T5QueryGenerator,
    checkpoints,
    synthesize,
)
from tfdpsq.generator.checkpoints import huggingface, keras_preset, prompt_file, t5x
from tfdpsq.generator.decoder import CachedDecoder
from tfdpsq.generator.decoding import (
    ROWS_ROUNDED_ALIKE,
    decodable_logits_mask,
    generate,
)
from tfdpsq.layers import encoder_of
from tfdpsq.validation import DataError, InputError

_V, _P, _EOS = 60, 5, 1


_generator = functools.partial(attentive.generator, layers=1, soft_prompt=_P)


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def model(request):
    return _generator(request.param, layers=2)


@pytest.fixture(scope="module")
def untied():
    """Of version 1.1 alone: for rows, which no version treats otherwise."""
    return _generator("1.1")


def _batch(rows=6, length=12, query_length=7):
    random = np.random.default_rng(0)
    batch = {}
    for name, most in (("document", length), ("query", query_length)):
        lengths = random.integers(2, most + 1, rows)
        ids = random.integers(3, _V, (rows, most))
        ids[np.arange(most)[None] >= lengths[:, None]] = 0
        batch[f"{name}_ids"] = tf.constant(ids, tf.int32)
        batch[f"{name}_lengths"] = tf.constant(lengths, tf.int32)
    return batch


def test_it_is_what_words_of_its_own_would_be(model):
    """A model without one, whose vocabulary has the vectors as further words."""
    version = model.config.version
    other = attentive.generator(version, _V + _P)
    theirs = iter(v for v in model.backbone.weights if "soft_prompt" not in v.name)
    vectors = model.backbone.soft_prompt.vectors.numpy()
    for variable in other.backbone.weights:
        value = next(theirs).numpy()
        if variable.shape == [_V + _P, 16]:
            value = np.concatenate([value, vectors])
        elif variable.shape == [16, _V + _P]:
            value = np.concatenate([value, np.zeros([16, _P])], axis=1)
        variable.assign(value)
    batch = _batch()
    words = tf.tile(tf.range(_V, _V + _P)[None], [6, 1])
    spelled = {
        **batch,
        "document_ids": tf.concat([words, batch["document_ids"]], 1),
        "document_lengths": batch["document_lengths"] + _P,
    }
    np.testing.assert_allclose(model(batch), other(spelled)[..., :_V], atol=2e-5)
    ours, expected = model.states(batch), other.states(spelled)
    np.testing.assert_allclose(
        ours["encoder_sequence_output"],
        expected["encoder_sequence_output"][:, _P:],
        atol=1e-5,
    )
    mask = tf.sequence_mask(batch["document_lengths"], 12, tf.int32)
    encoded = model.encode(batch["document_ids"], mask)
    np.testing.assert_allclose(encoded, expected["encoder_sequence_output"], atol=1e-5)
    # And it matters.
    plain = attentive.generator(version)
    assert np.abs(plain(batch) - model(batch)).max() > 0.1


def test_padding_changes_no_loss(untied):
    batch = _batch()
    wider = {
        name: tf.pad(value, [[0, 0], [0, 5]]) if value.shape.rank == 2 else value
        for name, value in batch.items()
    }
    wider["document_ids"] += 7 * tf.cast(
        tf.range(17)[None] >= batch["document_lengths"][:, None], tf.int32
    )
    np.testing.assert_allclose(
        untied.per_example_losses(wider), untied.per_example_losses(batch), rtol=1e-5
    )


def test_a_rows_loss_depends_on_that_row_alone(untied):
    batch = _batch()
    other = {name: tf.reverse(value, [0]) for name, value in batch.items()}
    mixed = {
        name: tf.concat([value[:1], other[name][1:]], 0)
        for name, value in batch.items()
    }
    np.testing.assert_allclose(
        untied.per_example_losses(mixed)[0],
        untied.per_example_losses(batch)[0],
        rtol=1e-5,
    )


def test_cached_logits_equal_the_uncached_models(model):
    batch = _batch(query_length=7)
    batch["query_lengths"] = tf.fill([6], 7)
    mask = tf.sequence_mask(batch["document_lengths"], 12, tf.int32)
    decoder = CachedDecoder(model, 7)
    documents = decoder.documents(model.encode(batch["document_ids"], mask), mask)
    inputs = tf.pad(batch["query_ids"][:, :-1], [[0, 0], [1, 0]])
    cache, found = decoder.empty_cache(6), []

    @tf.function
    def logits_of(t, tokens, cache):
        return decoder.step(t, tokens, cache, documents, decoder.position_bias())

    for t in range(7):
        logits, cache = logits_of(tf.constant(t), inputs[:, t], cache)
        found.append(logits)
    np.testing.assert_allclose(np.stack(found, 1), model(batch), atol=1e-4)


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_greedy_decoding_is_the_argmax_of_the_uncached_model(model, jit):
    batch = _batch()
    run = tf.function(
        lambda ids, lengths: generate(
            model,
            ids,
            lengths,
            tf.zeros([6, 10]),
            SamplingConfig(temperature=0.0),
            decodable_logits_mask(_V, 50, (0, 2)),
            _EOS,
        ),
        jit_compile=jit,
    )
    ids, lengths = run(batch["document_ids"], batch["document_lengths"])
    logits = model({**batch, "query_ids": ids, "query_lengths": lengths}).numpy()
    logits[:, :, 50:] = logits[:, :, [0, 2]] = logits[:, :1, _EOS, None] = -np.inf
    for row, length in enumerate(lengths.numpy()):
        np.testing.assert_array_equal(
            ids[row, :length], logits[row, :length].argmax(-1)
        )


def test_a_query_does_not_depend_on_the_batch_it_is_written_in(tmp_path):
    texts = [f"reads the {word} of file {i}" for i, word in enumerate("abcdefgh" * 9)]
    tokenizer = Tokenizer(train_vocabulary(texts, 290, tmp_path / "spiece.model"))
    model = _generator("1.1", size=300)
    documents = [
        Document(f"d{i}", "", "reads the file " * (i % 5) + f"of {i}") for i in range(9)
    ]
    written = []
    for batch_size in (8, 16):
        config = SynthesisConfig(
            1, document_length=24, query_length=6, batch_size=batch_size
        )
        rows = synthesize(model, tokenizer, documents, config)
        written.append([row.query for row in rows])
    assert written[0] == written[1] and len(set(written[0])) > 5


def test_rows_with_a_prompt_are_as_wide_as_what_is_rounded_alike(untied, monkeypatch):
    """16 tokens and five vectors: 21 is not a multiple of 24."""
    seen, encode = [], untied.encode
    monkeypatch.setattr(
        untied, "encode", lambda *given: seen.append(encode(*given)) or seen[-1]
    )
    generate(
        untied,
        tf.ones([2, 16], tf.int32),
        tf.constant([16, 3]),
        tf.zeros([2, 1]),
        SamplingConfig(temperature=0.0),
        decodable_logits_mask(_V, 50, (0, 2)),
        _EOS,
    )
    assert [states.shape[1] for states in seen] == [24]
    assert 24 % ROWS_ROUNDED_ALIKE == 0


def test_saved_and_loaded_models_are_equal(tmp_path):
    model = _generator("1.0")
    model.save_to_preset(tmp_path)
    names = {"config.json", "model.safetensors", "soft_prompt.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    loaded = T5QueryGenerator.from_preset(tmp_path)
    batch = _batch()
    np.testing.assert_array_equal(loaded(batch), model(batch))
    again = T5QueryGenerator.from_preset(tmp_path, "mixed_bfloat16", True, _P)
    np.testing.assert_array_equal(
        again.backbone.soft_prompt.vectors, model.backbone.soft_prompt.vectors
    )
    _, backbone = checkpoints.load(tmp_path)
    assert backbone.soft_prompt.length == _P
    # Saved there again without one, none is left of the first.
    _generator("1.0", soft_prompt=0).save_to_preset(tmp_path)
    assert T5QueryGenerator.from_preset(tmp_path).backbone.soft_prompt is None


def test_a_model_without_one_gets_a_new_one(tmp_path):
    plain = _generator("1.1", soft_prompt=0)
    plain.save_to_preset(tmp_path)
    loaded = T5QueryGenerator.from_preset(tmp_path, soft_prompt=2)
    vectors = loaded.backbone.soft_prompt.vectors
    assert np.abs(vectors).max() <= 0.5
    loaded.start_soft_prompt([7, 3])
    np.testing.assert_array_equal(
        vectors, plain.backbone.token_embedding.embeddings.numpy()[[7, 3]]
    )
    for ids, message in (
        ([1], "1 token ids were given for a soft prompt of 2"),
        ([1, _V], f"token id is {_V}"),
    ):
        with pytest.raises(InputError, match=message):
            loaded.start_soft_prompt(ids)
    with pytest.raises(InputError, match="a soft prompt of 0 vectors"):
        plain.start_soft_prompt([])


def test_nothing_drops_one_silently(tmp_path):
    model = _generator("1.1")
    model.save_to_preset(tmp_path)
    for wanted in (0, 3):
        message = f"soft_prompt.safetensors: .* of 5 vectors, where one of {wanted} is"
        with pytest.raises(DataError, match=message + ".*length to 5"):
            T5QueryGenerator.from_preset(tmp_path, soft_prompt=wanted)
    checkpoint = checkpoints.open_checkpoint(tmp_path)
    with pytest.raises(DataError, match="5 vectors, where one of 0 is wanted"):
        checkpoint.load_into(_generator("1.1", soft_prompt=0).backbone)
    for load in (
        checkpoints.load_encoder,
        lambda path: checkpoints.open_checkpoint(path, encoder_only=True),
    ):
        with pytest.raises(DataError, match="an encoder alone has no place for"):
            load(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    for source in (model.backbone, checkpoint):
        for writer in (keras_preset, t5x):
            with pytest.raises(InputError, match="prompt of 5 vectors.*no place for"):
                writer.save(out, model.config, source)
    encoder = encoder_of(model.backbone)
    with pytest.raises(InputError, match="which an encoder alone has no place for"):
        huggingface.save(out, model.config, encoder, encoder_only=True)
    assert not list(out.iterdir())


def _write(path, **tensors):
    path.write_bytes(safetensors.numpy.save(tensors))


def _with_nan(path):
    vectors = np.zeros([5, 16], np.float32)
    vectors[3, 2] = np.nan
    _write(path, soft_prompt=vectors)


_DAMAGES = {
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-7]), "truncated or damaged"),
    "empty": (lambda p: p.write_bytes(b""), "truncated or damaged"),
    "another model's": (
        lambda p: _write(p, soft_prompt=np.ones([5, 12], np.float32)),
        r"has shape \[5, 12\], the model's config makes it \[length, 16\]",
    ),
    "no vectors": (
        lambda p: _write(p, soft_prompt=np.ones([0, 16], np.float32)),
        r"has shape \[0, 16\]",
    ),
    "one vector, flat": (
        lambda p: _write(p, soft_prompt=np.ones([16], np.float32)),
        r"has shape \[16\]",
    ),
    "integers": (
        lambda p: _write(p, soft_prompt=np.ones([5, 16], np.int32)),
        "holds int32, not float32",
    ),
    "another name": (
        lambda p: _write(p, prompt=np.ones([5, 16], np.float32)),
        "holds the tensors prompt, not soft_prompt alone",
    ),
    "NaN": (_with_nan, "holds NaN or infinity in row 3"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    _generator("1.1").save_to_preset(directory)
    return directory


@pytest.mark.parametrize("name", _DAMAGES)
def test_a_damaged_file_is_named(name, saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage, message = _DAMAGES[name]
    damage(tmp_path / prompt_file.FILE_NAME)
    with pytest.raises(DataError, match=f"soft_prompt.safetensors: .*{message}"):
        T5QueryGenerator.from_preset(tmp_path)


def test_a_prompt_that_is_no_number_is_not_saved(tmp_path):
    model = _generator("1.1")
    model.backbone.soft_prompt.vectors[2, 3].assign(np.inf)
    with pytest.raises(InputError, match="soft prompt holds values that are not fin"):
        model.save_to_preset(tmp_path)
    # Without its config, the directory is no checkpoint.
    assert not (tmp_path / "config.json").exists()


def test_its_file_is_part_of_what_a_reader_finds(saved):
    """A tensor of this name and shape, for whoever builds the same elsewhere."""
    tensors = safetensors.numpy.load_file(saved / "soft_prompt.safetensors")
    assert {name: value.shape for name, value in tensors.items()} == {
        "soft_prompt": (_P, 16)
    }
    assert "soft_prompt" not in json.loads((saved / "config.json").read_text())
