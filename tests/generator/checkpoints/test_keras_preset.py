"""keras-nlp presets, against keras-nlp's own T5Backbone and T5Tokenizer.

The configs below are what `save_to_preset` wrote on Keras 3.3.3 with keras-nlp 0.12.1,
and on Keras 3.8.0 with keras-hub 0.19.3: recorded, since it does not run on Keras 2.
Both name the datasets as `save_weights` does here, and loaded what is written here,
with equal outputs.
"""

import json
import resource

import h5py
import keras_nlp
import numpy as np
import pytest
from keras_nlp.src.models.t5.t5_backbone import T5Backbone
from keras_nlp.src.models.t5.t5_tokenizer import T5Tokenizer

from tfdpsq import layers, validation
from tfdpsq.data import Tokenizer, train_vocabulary
from tfdpsq.generator import checkpoints
from tfdpsq.generator.checkpoints import keras_preset
from tfdpsq.layers import T5Config
from tfdpsq.validation import InputError

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
    found = outputs(ours)
    for name, expected in outputs(theirs).items():
        error = np.abs(found[name] - expected).max() / np.abs(expected).max()
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
    checkpoints.save(tmp_path, config, ours, form="keras")

    assert config.version == ("1.0" if theirs.tie_embedding_weights else "1.1")
    assert_same_outputs(ours, theirs)
    again = keras_nlp.models.Backbone.from_preset(str(tmp_path))
    assert_same_outputs(again, theirs)
    written = datasets(tmp_path / "model.weights.h5")
    expected = datasets(directory / "model.weights.h5")
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def small():
    """A T5 1.1 of one layer, to write from and to load into."""
    config = T5Config(310, 1, 2, 6, 5, 4, "1.1")
    return config, layers.T5Backbone(config)


@pytest.fixture
def preset(small, tmp_path):
    """A good preset in a directory of its own, to be damaged."""
    (tmp_path / "preset").mkdir()
    checkpoints.save(tmp_path / "preset", *small, form="keras")
    return tmp_path / "preset"


def test_full_disk_is_reported_and_leaves_nothing(small, tmp_path):
    """It ended the process, with tracebacks, where it closed its file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(InputError, match="model.weights.h5: cannot be written"):
            checkpoints.save(tmp_path / "preset", *small, form="keras")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.rglob("*.h5")) == []
    checkpoints.save(tmp_path / "preset", *small, form="keras")
    assert checkpoints.open_checkpoint(tmp_path / "preset").format == "keras"


def test_the_vocabulary_becomes_keras_nlps_tokenizer(small, tmp_path):
    texts = ["The gradient of every query is clipped.", "Every clipped one is noised."]
    texts += [f"query {i} reads what every gradient said of it" for i in range(40)]
    file = train_vocabulary(texts, 300, tmp_path / "spiece.model")
    checkpoints.save(tmp_path, *small, vocabulary=file, form="keras")
    theirs = T5Tokenizer.from_preset(str(tmp_path))("every gradient is clipped")
    ids, lengths = Tokenizer(file).encode(["every gradient is clipped"], 40)

    # keras-nlp's adds no EOS, ours always does.
    assert theirs.numpy().tolist() == ids[0, : lengths[0] - 1].numpy().tolist()


@pytest.mark.parametrize(
    ("version", "changes", "expected"),
    [
        ("1.1", {"activation": "keras_nlp>gelu_approximate"}, {}),
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


def test_config_of_another_model_is_refused_with_key_and_value(tmp_path):
    write_config(tmp_path, "1.1", activation="gelu")
    with pytest.raises(validation.DataError, match="config.json: activation is 'gelu'"):
        keras_preset.read_config(tmp_path / "config.json")


def test_damaged_files_are_named(preset):
    """`test_huggingface_refusals` has what all formats share: names, shapes, NaN."""
    weights, config = preset / "model.weights.h5", preset / "config.json"
    whole = config.read_text()
    config.write_text('{"registered_name": "x"}')
    with pytest.raises(validation.DataError, match=f"^{config}: .*damaged"):
        checkpoints.open_checkpoint(preset)
    config.write_text(whole)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(validation.DataError, match=f"^{weights}: .*truncated"):
        checkpoints.open_checkpoint(preset)
