"""keras-nlp presets, against keras-nlp's own T5Backbone and T5Tokenizer.

`LAYOUT` and the configs below are what `save_to_preset` wrote on Keras 3.3.3 with
keras-nlp 0.12.1, and on Keras 3.8.0 with keras-hub 0.19.3: recorded, since it does not
run on Keras 2. Both also loaded what is written here, with equal outputs.
"""

import json
import resource
import shutil

import h5py
import kagglehub
import numpy as np
import pytest
import requests
from keras_nlp.src.models.t5.t5_backbone import T5Backbone
from keras_nlp.src.models.t5.t5_tokenizer import T5Tokenizer
from keras_nlp.src.utils import preset_utils

from tfdpsq import layers, validation
from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.generator import checkpoints
from tfdpsq.generator.checkpoints import keras_preset
from tfdpsq.layers import T5Config
from tfdpsq.validation import InputError

# The datasets of one encoder and one decoder layer of T5 1.1.
LAYOUT = """
layers/reversible_embedding/vars/0
layers/reversible_embedding/vars/1
layers/t5_layer_norm/vars/0
layers/t5_layer_norm_1/vars/0
layers/t5_transformer_layer/gate_projector/vars/0
layers/t5_transformer_layer/input_projector/vars/0
layers/t5_transformer_layer/layer_norm/vars/0
layers/t5_transformer_layer/output_projector/vars/0
layers/t5_transformer_layer/self_attention/key_projector/vars/0
layers/t5_transformer_layer/self_attention/output_projector/vars/0
layers/t5_transformer_layer/self_attention/query_projector/vars/0
layers/t5_transformer_layer/self_attention/value_projector/vars/0
layers/t5_transformer_layer/self_attention/vars/0
layers/t5_transformer_layer/self_attention_layer_norm/vars/0
layers/t5_transformer_layer_1/cross_attention/key_projector/vars/0
layers/t5_transformer_layer_1/cross_attention/output_projector/vars/0
layers/t5_transformer_layer_1/cross_attention/query_projector/vars/0
layers/t5_transformer_layer_1/cross_attention/value_projector/vars/0
layers/t5_transformer_layer_1/cross_attention_layer_norm/vars/0
layers/t5_transformer_layer_1/gate_projector/vars/0
layers/t5_transformer_layer_1/input_projector/vars/0
layers/t5_transformer_layer_1/layer_norm/vars/0
layers/t5_transformer_layer_1/output_projector/vars/0
layers/t5_transformer_layer_1/self_attention/key_projector/vars/0
layers/t5_transformer_layer_1/self_attention/output_projector/vars/0
layers/t5_transformer_layer_1/self_attention/query_projector/vars/0
layers/t5_transformer_layer_1/self_attention/value_projector/vars/0
layers/t5_transformer_layer_1/self_attention/vars/0
layers/t5_transformer_layer_1/self_attention_layer_norm/vars/0
""".split()
GELU = {
    "module": "builtins",
    "class_name": "function",
    "config": "keras_nlp>gelu_approximate",
    "registered_name": "function",
}
SIZES = {
    "vocabulary_size": 32,
    "hidden_dim": 6,
    "intermediate_dim": 5,
    "num_heads": 2,
    "key_value_dim": 4,
}
STYLES = {
    "1.0": {
        "activation": "relu",
        "use_gated_activation": False,
        "tie_embedding_weights": True,
    },
    "1.1": {
        "activation": GELU,
        "use_gated_activation": True,
        "tie_embedding_weights": False,
    },
}
EMBEDDING = "layers/reversible_embedding/vars/0"
KEYS = "layers/t5_transformer_layer_1/cross_attention/key_projector/vars/0"


def write_config(directory, version, num_layers=1, package="keras_nlp", **changes):
    config = {
        "name": "t5_backbone",
        "trainable": True,
        "num_layers": num_layers,
        "dropout": 0.1,
        "layer_norm_epsilon": 1e-06,
        **SIZES,
        **STYLES[version],
        **changes,
    }
    content = {
        "module": f"{package}.src.models.t5.t5_backbone",
        "class_name": "T5Backbone",
        "config": {key: of for key, of in config.items() if of != "absent"},
        "registered_name": f"{package}>T5Backbone",
    }
    (directory / "config.json").write_text(json.dumps(content, indent=4))


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def stock(request, tmp_path_factory):
    """keras-nlp's own model with random weights, and its preset."""
    version, directory = request.param, tmp_path_factory.mktemp("stock")
    num_layers = 2 if version == "1.0" else 1
    config = {**SIZES, **STYLES[version], "num_layers": num_layers}
    if version == "1.1":
        config["activation"] = "keras_nlp>gelu_approximate"
    model = T5Backbone(**config)
    random = np.random.default_rng(0)
    model.set_weights([random.normal(size=w.shape) * 0.5 for w in model.weights])
    model.save_weights(directory / "model.weights.h5")
    write_config(directory, version, num_layers)
    return model, directory


def outputs(model):
    states = model(
        {
            "encoder_token_ids": np.array([[3, 14, 5, 1, 0], [9, 1, 0, 0, 0]]),
            "encoder_padding_mask": np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]),
            "decoder_token_ids": np.array([[0, 17, 8], [0, 1, 0]]),
            "decoder_padding_mask": np.array([[1, 1, 1], [1, 1, 0]]),
        }
    )
    return {name: value.numpy() for name, value in states.items()}


def assert_same_outputs(ours, theirs):
    for name, expected in outputs(theirs).items():
        error = np.abs(outputs(ours)[name] - expected).max() / np.abs(expected).max()
        assert error < 1e-6, name


def datasets(file):
    found = {}
    with h5py.File(file) as opened:
        opened.visititems(
            lambda name, item: (
                found.update({name: item[()]})
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return found


def test_a_preset_and_keras_nlps_model_agree_in_both_directions(stock, tmp_path):
    theirs, directory = stock
    config, ours = checkpoints.load(directory)
    keras_preset.save(tmp_path, config, ours)

    assert config.version == ("1.0" if theirs.tie_embedding_weights else "1.1")
    assert_same_outputs(ours, theirs)
    assert_same_outputs(T5Backbone.from_preset(str(tmp_path)), theirs)
    written = datasets(tmp_path / "model.weights.h5")
    expected = datasets(directory / "model.weights.h5")
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def small():
    """A T5 1.1 of one layer, to write from and to load into."""
    config = T5Config(32, 1, 2, 6, 5, 4, "1.1")
    return config, layers.T5Backbone(config)


@pytest.fixture
def preset(small, tmp_path):
    """A good preset in a directory of its own, to be damaged."""
    (tmp_path / "preset").mkdir()
    keras_preset.save(tmp_path / "preset", *small)
    return tmp_path / "preset"


def test_a_full_disk_is_told_before_hdf5_finds_it(small, tmp_path):
    """It ended the process, with tracebacks, where it closed its file."""
    for limit in (5000, 30_000):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(InputError, match="model.weights.h5: cannot be written"):
                keras_preset.save(tmp_path / "preset", *small)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.rglob("*.h5")) == []
    keras_preset.save(tmp_path / "preset", *small)
    assert keras_preset.matches(tmp_path / "preset")


def test_the_layout_is_that_of_keras_3(preset):
    assert sorted(datasets(preset / "model.weights.h5")) == sorted(LAYOUT)


def test_saving_what_was_loaded_gives_the_same_bytes(small, preset, tmp_path):
    config, model = small
    found = keras_preset.open_checkpoint(preset)
    model.set_weights([np.zeros(weight.shape) for weight in model.weights])
    found.load_into(model)
    keras_preset.save(tmp_path, found.config, model)

    assert found.config == config
    for name in ("config.json", "metadata.json", "model.weights.h5"):
        assert (tmp_path / name).read_bytes() == (preset / name).read_bytes()


def test_the_vocabulary_becomes_keras_nlps_tokenizer(small, tmp_path):
    texts = ["The gradient of every query is clipped.", "Every clipped one is noised."]
    texts += [f"query {i} reads what every gradient said of it" for i in range(40)]
    file = train_vocabulary(texts, 300, tmp_path / "spiece.model")
    keras_preset.save(tmp_path, *small, vocabulary=file)
    theirs = T5Tokenizer.from_preset(str(tmp_path))("every gradient is clipped")
    ids, lengths = Tokenizer(file).encode(["every gradient is clipped"], 40)

    # keras-nlp's adds no EOS, ours always does.
    assert theirs.numpy().tolist() == ids[0, : lengths[0] - 1].numpy().tolist()


def test_bfloat16_as_keras_3_writes_it(small, preset):
    weights_file = preset / "model.weights.h5"
    halves = np.arange(32 * 6, dtype=np.uint16).reshape(32, 6) + 0x3F80  # from 1.0 on
    with h5py.File(weights_file, "a") as file:
        del file[EMBEDDING]
        file.create_dataset(EMBEDDING, data=halves.view("V2"))
        file[EMBEDDING].attrs["dtype"] = "bfloat16"
    config, model = small
    keras_preset.open_checkpoint(preset).load_into(model)

    expected = (halves.astype(np.uint32) << 16).view(np.float32)
    assert expected[0, 0] == 1.0
    assert np.array_equal(model.token_embedding.embeddings, expected)


@pytest.mark.parametrize(
    ("version", "changes", "expected"),
    [
        ("1.1", {"activation": "keras_nlp>gelu_approximate"}, {}),
        ("1.1", {"package": "keras_hub"}, {}),
        ("1.0", {"activation": "absent", "tie_embedding_weights": "absent"}, {}),
        # As the published t5_base_multi leaves it out: hidden size over heads.
        ("1.0", {"key_value_dim": None}, {"key_value_dim": 3}),
    ],
)
def test_configs_that_mean_a_published_t5(tmp_path, version, changes, expected):
    write_config(tmp_path, version, **changes)
    found = keras_preset.read_config(tmp_path / "config.json")

    sizes = {**SIZES, **expected}
    assert found == T5Config(**sizes, num_layers=1, version=version)


@pytest.mark.parametrize(
    ("version", "changes", "messages"),
    [
        ("1.0", {"use_gated_activation": True}, ["'relu'", "True", "1.1"]),
        ("1.0", {"tie_embedding_weights": False}, ["tie_embedding_weights False"]),
        ("1.1", {"activation": "gelu"}, ["activation 'gelu'"]),
        # What the first published flan presets had: no head.
        ("1.1", {"tie_embedding_weights": True}, ["tie_embedding_weights True"]),
        ("1.1", {"layer_norm_epsilon": 1e-5}, ["layer_norm_epsilon is 1e-05"]),
        ("1.1", {"hidden_dim": "absent"}, ["lacks hidden_dim"]),
        ("1.1", {"num_heads": 0}, ["num_heads is 0"]),
    ],
)
def test_other_configs_are_refused_with_key_and_value(
    tmp_path, version, changes, messages
):
    write_config(tmp_path, version, **changes)
    with pytest.raises(validation.DataError) as caught:
        keras_preset.read_config(tmp_path / "config.json")

    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert all(message in str(caught.value) for message in messages)


def test_an_encoder_needs_no_head(preset):
    write_config(preset, "1.1", tie_embedding_weights=True)
    config, encoder = checkpoints.load_encoder(preset)
    expected = datasets(preset / "model.weights.h5")["layers/t5_layer_norm/vars/0"]

    assert config.version == "1.1"
    norm = encoder.get_layer("encoder_output_layer_norm").weight
    assert np.array_equal(norm, expected)


def change(name, make):
    def damage(preset):
        with h5py.File(preset / "model.weights.h5", "a") as file:
            values = make(file[name][()])
            del file[name]
            if values is not None:
                file[name] = values

    return damage


def cut(preset):
    file = preset / "model.weights.h5"
    file.write_bytes(file.read_bytes()[:-100])


def with_nan(values):
    values[2, 3] = np.nan
    return values


@pytest.mark.parametrize(
    ("damage", "file", "messages"),
    [
        (cut, "model.weights.h5", ["truncated"]),
        (lambda p: (p / "model.weights.h5").unlink(), "model.weights.h5", ["missing"]),
        (lambda p: (p / "config.json").unlink(), "config.json", ["cannot be read"]),
        (
            lambda p: (p / "config.json").write_text("{}"),
            "config.json",
            ["not a config"],
        ),
        (
            lambda p: write_config(p, "1.1", num_layers=2),
            "model.weights.h5",
            ["lacks", "t5_transformer_layer_2"],
        ),
        (change(KEYS, lambda v: None), "model.weights.h5", ["lacks 1 tensor", KEYS]),
        (
            change(KEYS, lambda v: v[:, :7]),
            "model.weights.h5",
            [KEYS, "[6, 7]", "[6, 8]"],
        ),
        (change(KEYS, with_nan), "model.weights.h5", [KEYS, "NaN", "row 2"]),
        (change(EMBEDDING, lambda v: v.astype(np.int8)), "model.weights.h5", ["int8"]),
        (
            lambda p: write_config(p, "1.1", vocabulary_size=31),
            "model.weights.h5",
            [EMBEDDING, "[32, 6]", "[31, 6]"],
        ),
    ],
)
def test_damage_is_named_by_file_weight_and_shapes(
    small, preset, damage, file, messages
):
    damage(preset)
    with pytest.raises(validation.DataError) as caught:
        keras_preset.open_checkpoint(preset).load_into(small[1])

    text = str(caught.value)
    assert text.startswith(f"{preset / file}: ")
    assert all(message in text for message in messages), text


@pytest.mark.parametrize(
    ("dtype", "encoder_only"), [("bfloat16", False), ("float32", True)]
)
def test_what_no_preset_can_be_is_refused(small, tmp_path, dtype, encoder_only):
    with pytest.raises(validation.InputError, match="whole T5 in float32"):
        keras_preset.save(tmp_path, *small, dtype=dtype, encoder_only=encoder_only)

    assert list(tmp_path.iterdir()) == []


def test_a_known_name_is_got_by_keras_nlp(preset, monkeypatch, tmp_path):
    asked = []

    def get_file(name, path):
        asked.append((name, path))
        return str(preset / path)

    monkeypatch.setattr(preset_utils, "get_file", get_file)
    monkeypatch.chdir(tmp_path)
    found = checkpoints.open_checkpoint("t5_small_multi")

    assert found.config.version == "1.1"
    assert ("t5_small_multi", "model.weights.h5") in asked
    shutil.rmtree(preset)
    (tmp_path / "t5_small_multi").mkdir()  # A directory of the name comes first.
    with pytest.raises(validation.InputError, match="t5_small_multi holds no T5"):
        checkpoints.open_checkpoint("t5_small_multi")


def test_without_a_network_a_name_is_one_line_with_the_remedy(monkeypatch):
    def offline(handle, path):
        raise requests.ConnectionError("no route to api.kaggle.com\nand a long trace")

    monkeypatch.setattr(kagglehub, "model_download", offline)
    with pytest.raises(validation.InputError) as caught:
        checkpoints.load("flan_base_multi")

    assert str(caught.value) == (
        "preset flan_base_multi cannot be downloaded (no route to api.kaggle.com). "
        "Connect to the network, or give a directory that holds the preset."
    )
    with pytest.raises(validation.InputError, match="t5_base_multi, t5_large_multi"):
        checkpoints.load("t5_medium_multi")
