"""Checkpoints written by `transformers`, and copies of them to change or spoil."""

import json
import pathlib
import shutil

import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from tfdpsq.generator.checkpoints import load, open_checkpoint
from tfdpsq.layers import T5Backbone

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
VERSIONS = ("1.0", "1.1")
_PLAIN = {"format": "pt"}  # as `save_pretrained` marks its files


class Copy:
    """A Hugging Face directory that a test may change."""

    def __init__(self, path):
        self.path = path
        self.config_file = path / "config.json"
        self.weights_file = path / "model.safetensors"
        self.index_file = path / "model.safetensors.index.json"

    def change_config(self, **changes):
        """Sets keys of the config; `...` removes one."""
        values = {**json.loads(self.config_file.read_text()), **changes}
        values = {key: value for key, value in values.items() if value is not ...}
        self.config_file.write_text(json.dumps(values))

    def change_tensors(self, change):
        """Applies a function to {name: array}."""
        tensors = load_file(self.weights_file)
        change(tensors)
        save_file(tensors, self.weights_file, _PLAIN)

    def shard(self, parts=3):
        """Splits the weights as `save_pretrained` does; returns the index."""
        tensors = load_file(self.weights_file)
        self.weights_file.unlink()
        names, places = sorted(tensors), {}
        for number in range(parts):
            file = f"model-{number + 1:05}-of-{parts:05}.safetensors"
            part = {name: tensors[name] for name in names[number::parts]}
            save_file(part, self.path / file, _PLAIN)
            places.update(dict.fromkeys(part, file))
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        self.index_file.write_text(json.dumps(index))
        return index


@pytest.fixture
def copy_of(tmp_path):
    """Copies the fixture of a version to "theirs", to be changed."""

    def copy(version="1.0"):
        target = tmp_path / "theirs"
        shutil.copytree(FIXTURES / f"t5_{version}", target)
        return Copy(target)

    return copy


@pytest.fixture(scope="session")
def models():
    """{version: (config, backbone)} of the fixtures; not to be changed."""
    return {version: load(FIXTURES / f"t5_{version}") for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def loaded(request, models):
    """(directory, config, backbone) of each fixture; not to be changed."""
    return FIXTURES / f"t5_{request.param}", *models[request.param]


@pytest.fixture(scope="session")
def read():
    """Reads a directory into a backbone that held only zeros before.

    Every call with the same version returns the same backbone: making one takes long.
    """
    made = {}

    def load_zeroed(path):
        checkpoint = open_checkpoint(path)
        version = checkpoint.config.version
        if version not in made:
            made[version] = T5Backbone(checkpoint.config)
        backbone = made[version]
        for variable in backbone.variables:
            variable.assign(tf.zeros_like(variable))
        checkpoint.load_into(backbone)
        return checkpoint.config, backbone

    return load_zeroed
