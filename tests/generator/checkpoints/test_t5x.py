"""T5X checkpoints: against files and a network made by hand (`t5x_by_hand.py`)."""

import json

import numpy as np
import pytest
from helpers import t5x_by_hand as hand

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.layers import T5Backbone, T5Config

random_arrays, write_checkpoint = hand.random_arrays, hand.write_checkpoint
HIDDEN, HEADS, VOCABULARY = hand.HIDDEN, hand.HEADS, hand.VOCABULARY


def config_of(version):
    return T5Config(
        VOCABULARY, hand.LAYERS, HEADS, HIDDEN, hand.WIDE, hand.WIDTH, version
    )


@pytest.fixture(scope="module")
def backbones():
    """Models to load into, by version; building one takes longer than its test."""
    return {version: T5Backbone(config_of(version)) for version in ("1.0", "1.1")}


# -- Reading ------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_loaded_checkpoint_computes_what_t5x_computes(tmp_path, version):
    arrays = random_arrays(version)
    model = T5QueryGenerator.from_preset(write_checkpoint(tmp_path / "t5x", arrays))
    random = np.random.default_rng(1)
    document, query = random.integers(3, VOCABULARY, 30), np.array([9, 4, 33, 1])
    logits = model(
        {
            "document_ids": np.pad(document, (0, 2))[None],
            "document_lengths": np.array([30]),
            "query_ids": query[None],
            "query_lengths": np.array([4]),
        }
    )

    assert model.config == config_of(version)
    shifted = np.array([0, *query[:-1]])
    assert hand.error_of(logits[0], hand.network(arrays, document, shifted)) < 1e-5


def test_remote_checkpoint_is_copied_once(tmp_path, monkeypatch):
    """Here with a directory as its bucket."""
    path = write_checkpoint(tmp_path / "checkpoint_1000", random_arrays("1.1"))
    copy_tree = io.copy_tree
    monkeypatch.setattr(
        io,
        "copy_tree",
        lambda url, to: copy_tree(url.replace("gs://bucket", str(tmp_path)), to),
    )
    url = "gs://bucket/checkpoint_1000/"
    config, encoder = checkpoints.load_encoder(url)
    expected, theirs = checkpoints.load_encoder(path)
    assert config == expected
    for ours, other in zip(encoder.get_weights(), theirs.get_weights()):
        np.testing.assert_array_equal(ours, other)
    copied = checkpoints.locate(url)
    assert checkpoints.locate(url.rstrip("/")) == copied
    assert bytes_of(copied) == bytes_of(path)
    with pytest.raises(validation.InputError, match="absent holds no T5 checkpoint"):
        checkpoints.open_checkpoint("gs://bucket/absent")


def test_sentence_t5_encoder_loads_without_its_projection(tmp_path):
    arrays = random_arrays("1.1", sides=("encoder",))
    extra = {"projection_layer/kernel": np.ones((HIDDEN, 9), np.float32)}
    path = write_checkpoint(tmp_path, {**arrays, **extra})
    document = np.arange(3, 25)

    with pytest.raises(validation.DataError, match="lacks tensors: target/decoder"):
        checkpoints.open_checkpoint(path)
    config, encoder = checkpoints.load_encoder(path)
    states = encoder(
        {
            "encoder_token_ids": document[None],
            "encoder_padding_mask": np.ones((1, len(document)), np.int32),
        }
    )

    assert config == config_of("1.1")
    assert hand.error_of(states[0], hand.network(arrays, document)) < 1e-5


def test_bfloat16_is_read_exactly(tmp_path, backbones):
    # The upper half of a float32 is a bfloat16.
    halves = {
        name: (array.view(np.uint32) >> 16).astype(np.uint16)
        for name, array in random_arrays("1.0").items()
    }
    found = checkpoints.open_checkpoint(write_checkpoint(tmp_path, halves))
    backbone = backbones["1.0"]
    found.load_into(backbone)

    def exact(name):
        return (halves[name].astype(np.uint32) << 16).view(np.float32)

    expected = exact("token_embedder/embedding")
    assert np.array_equal(backbone.token_embedding.embeddings, expected)
    expected = exact("encoder/encoder_norm/scale")
    assert np.array_equal(backbone.encoder_layer_norm.weight, expected)


# -- Bad input ----------------------------------------------------------------------


def bytes_of(directory):
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("t5x"), random_arrays("1.1"))


@pytest.fixture
def copy(good, tmp_path):
    """A checkpoint to be damaged."""
    for name, content in bytes_of(good).items():
        path = tmp_path / "bad" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "bad"


def refusal(path, model=None):
    """What is said of a bad checkpoint; with a model, when it is loaded into that."""
    with pytest.raises(validation.InputError) as caught:
        found = checkpoints.open_checkpoint(path)
        assert model is not None, "the headers alone show nothing wrong"
        found.load_into(model)
    return str(caught.value)


def test_a_checkpoint_file_cut_anywhere_is_refused(copy):
    file = copy / "checkpoint"
    content = file.read_bytes()
    for size in [0, 30, len(content) // 2, len(content) - 1]:
        file.write_bytes(content[:size])
        assert refusal(copy).startswith(f"{file}: it is missing, truncated")
    for other in (b"no msgpack at all", hand.pack({"optimizer": {}})):
        file.write_bytes(other)
        assert refusal(copy).startswith(f"{file}: ")


KEY = "target.decoder.layers_1.self_attention.key.kernel"


def damage_header(path, **changes):
    header = path / KEY / ".zarray"
    header.write_text(json.dumps({**json.loads(header.read_text()), **changes}))


def test_a_damaged_directory_is_refused_by_its_name(copy, backbones):
    chunk = copy / KEY / "0.0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-20])
    assert refusal(copy, backbones["1.1"]).startswith(f"{chunk.parent}: ")
    chunk.unlink()
    assert '0.0" is missing' in refusal(copy, backbones["1.1"])
    chunk.write_bytes(content)
    damage_header(copy, shape=[6, 12], chunks=[6, 12])
    assert refusal(copy).startswith(f"{chunk.parent}: ")
