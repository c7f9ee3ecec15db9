"""T5X checkpoints: against files and a network made by hand (`t5x_by_hand.py`)."""

import json

import msgpack
import numpy as np
import pytest
from helpers import t5x_by_hand as hand

from tfdpsq import validation
from tfdpsq.data import any_files
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.generator.checkpoints import t5x
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


def test_remote_checkpoint_is_copied_without_its_optimizer(tmp_path):
    """On TensorFlow's file system in memory, as on gs://; copied once."""
    arrays = random_arrays("1.1")
    path = write_checkpoint(tmp_path / "t5x", arrays)
    slots = tmp_path / "t5x" / "state.param_states.encoder.v"
    slots.mkdir()
    (slots / "0.0").write_bytes(b"twice as large")
    for step in (900, 1000):
        any_files.copy_tree(str(path), f"ram://t5x/run/checkpoint_{step}")
    url = "ram://t5x/run/checkpoint_1000/"
    config, encoder = checkpoints.load_encoder(url)
    expected, theirs = checkpoints.load_encoder(path)
    assert config == expected
    for ours, other in zip(encoder.get_weights(), theirs.get_weights()):
        np.testing.assert_array_equal(ours, other)
    copied = checkpoints.locate(url)
    assert checkpoints.locate(url.rstrip("/")) == copied
    names = {each.name for each in copied.iterdir()}
    assert names == {each.name for each in path.iterdir()} - {slots.name}
    with pytest.raises(validation.InputError, match="holds 2 checkpoints.*_1000[.]$"):
        checkpoints.open_checkpoint("ram://t5x/run")


def test_sentence_t5_encoder_loads_with_extra_weights_ignored(tmp_path):
    arrays = random_arrays("1.1", sides=("encoder",))
    extra = {"projection_layer/kernel": np.ones((HIDDEN, 9), np.float32)}
    path = write_checkpoint(tmp_path, {**arrays, **extra})
    document = np.arange(3, 25)

    with pytest.raises(validation.DataError, match="holds an encoder only"):
        checkpoints.open_checkpoint(path)
    with pytest.raises(
        validation.DataError,
        match=r"checkpoint: .*target/projection_layer/kernel.*--ignore=target/proj",
    ):
        checkpoints.open_checkpoint(path, encoder_only=True)
    found = checkpoints.open_checkpoint(path, True, ["target/projection_layer/*"])
    with pytest.raises(validation.InputError, match="matches weights of the model"):
        checkpoints.open_checkpoint(path, True, ["*wo*"])
    write_checkpoint(tmp_path / "plain", arrays)
    config, encoder = checkpoints.load_encoder(tmp_path / "plain")
    states = encoder(
        {
            "encoder_token_ids": document[None],
            "encoder_padding_mask": np.ones((1, len(document)), np.int32),
        }
    )

    assert found.config == config == config_of("1.1")
    assert hand.error_of(states[0], hand.network(arrays, document)) < 1e-5


def test_bfloat16_is_read_exactly(tmp_path, backbones):
    # The upper half of a float32 is a bfloat16.
    halves = {
        name: (array.view(np.uint32) >> 16).astype(np.uint16)
        for name, array in random_arrays("1.0").items()
    }
    found = t5x.open_checkpoint(write_checkpoint(tmp_path, halves))
    backbone = backbones["1.0"]
    found.load_into(backbone)

    def exact(name):
        return (halves[name].astype(np.uint32) << 16).view(np.float32)

    expected = exact("token_embedder/embedding")
    assert np.array_equal(backbone.token_embedding.embeddings, expected)
    expected = exact("encoder/encoder_norm/scale")
    assert np.array_equal(backbone.encoder_layer_norm.weight, expected)


# -- Writing ------------------------------------------------------------------------


def bytes_of(directory):
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_saving_what_was_loaded_gives_back_weights_and_bytes(tmp_path, backbones):
    version = "1.1"
    arrays, model = random_arrays(version), backbones[version]
    place = write_checkpoint(tmp_path / "hand", arrays)
    for name in ("first", "second"):
        model.set_weights([np.zeros(weight.shape) for weight in model.weights])
        found = t5x.open_checkpoint(place)
        found.load_into(model)
        place = tmp_path / name
        place.mkdir()
        t5x.save(place, found.config, model)

    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "second")
    source = t5x.open_checkpoint(tmp_path / "second").source
    assert {name[len("target/") :] for name in source.tensors} == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(source.read(f"target/{name}", 0, len(array)), array)


def test_saved_files_are_msgpack_of_flax_and_zarr(tmp_path, backbones):
    backbone = backbones["1.1"]
    t5x.save(tmp_path, config_of("1.1"), backbone, dtype="bfloat16")

    content = (tmp_path / "checkpoint").read_bytes()
    tree = msgpack.unpackb(content)
    target = tree["optimizer"]["target"]
    bias_array = target["decoder"]["relpos_bias"]["rel_embedding"]
    shape, dtype, data = msgpack.unpackb(bias_array.data)
    layer = backbone.decoder_transformer_layers[0]
    expected = layer.self_attention.relative_attention_bias.numpy().T

    assert tree["version"] == 3 and tree["optimizer"]["state"]["step"].code == 1
    assert (bias_array.code, shape, dtype) == (1, [HEADS, 32], "bfloat16")
    values = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    # bfloat16 keeps 8 bits: rounding moves a value by at most 2^-8 of it.
    error = np.abs(values.view(np.float32).reshape(shape) - expected)
    assert np.all(error <= np.abs(expected) * 2**-8)
    place = target["decoder"]["logits_dense"]["kernel"]["kvstore"]["path"]
    header = json.loads((tmp_path / place / ".zarray").read_text())
    assert place == "target.decoder.logits_dense.kernel"
    assert (header["shape"], header["dtype"]) == ([HIDDEN, VOCABULARY], "bfloat16")


# -- Bad input ----------------------------------------------------------------------


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
        found = t5x.open_checkpoint(path)
        assert model is not None, "the headers alone show nothing wrong"
        found.load_into(model)
    return str(caught.value)


def test_a_checkpoint_file_cut_anywhere_is_refused(copy):
    file = copy / "checkpoint"
    content = file.read_bytes()
    for size in [0, 30, len(content) // 2, len(content) - 1]:
        file.write_bytes(content[:size])
        assert refusal(copy).startswith(f"{file}: it is truncated")
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
    assert refusal(copy, backbones["1.1"]).startswith(f"{chunk}: ")
    chunk.unlink()
    assert refusal(copy).startswith(f"{chunk}: ")
    chunk.write_bytes(content)
    damage_header(copy, shape=[6, 12], chunks=[6, 12])
    assert "has shape [6, 12]" in refusal(copy)


def test_another_architecture_is_refused_with_names_and_shapes(tmp_path, backbones):
    name = "decoder/layers_1/mlp/wo/kernel"
    for number, (change, message) in enumerate(
        (
            (lambda arrays: arrays.pop(name), f"lacks 1 tensor: target/{name}"),
            (lambda arrays: arrays.update({name: arrays[name][:, :5]}), "[10, 5]"),
            (lambda arrays: arrays[name].fill(np.nan), "NaN"),
        )
    ):
        arrays = random_arrays("1.1")
        change(arrays)
        path = write_checkpoint(tmp_path / str(number), arrays)
        text = refusal(path, backbones["1.1"])
        assert f"target/{name}" in text and message in text
