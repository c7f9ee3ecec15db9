"""The T5s that come with the package: found by name, without a network."""

import pytest
import tensorflow as tf

from tfdpsq.data import train_vocabulary
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.generator.checkpoints import (
    keras_preset,
    load_encoder,
    locate,
    presets,
    vocabulary_in,
)
from tfdpsq.layers import T5Config
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with one model, "t5_test", and things that are none."""
    base = tmp_path_factory.mktemp("shipped")
    folder = base / "presets"
    for name in ("t5_test", "empty"):
        (folder / name).mkdir(parents=True)
    (folder / "README.md").write_text("no model")
    lines = [f"The number {i} is read and given back." for i in range(40)]
    train_vocabulary(lines, 290, base / "spiece.model")
    tf.keras.utils.set_random_seed(0)
    model = T5QueryGenerator(T5Config(300, 1, 2, 8, 12, 4, "1.0", dropout=0.0))
    model.save_to_preset(folder / "t5_test", base / "spiece.model")
    return model, folder


@pytest.fixture
def shipped(made, monkeypatch):
    """The folder in place of the package's own."""
    model, folder = made
    monkeypatch.setattr(presets, "_FOLDER", folder)
    # Whatever is asked for, nothing is downloaded.
    monkeypatch.setattr(keras_preset, "download", lambda name: pytest.fail(name))
    return model, folder


def test_a_name_that_ships_is_found(shipped, tmp_path, monkeypatch):
    model, folder = shipped
    assert presets.names() == ["t5_test"]
    assert locate("t5_test") == presets.directory_of("t5_test") == folder / "t5_test"
    monkeypatch.chdir(tmp_path)  # wherever one is
    loaded = T5QueryGenerator.from_preset("t5_test")
    for one, other in zip(loaded.weights, model.weights):
        tf.debugging.assert_equal(one, other)
    config, encoder = load_encoder("t5_test")
    assert config == model.config
    assert [w.shape for w in encoder.weights] == [
        w.shape for w in model.encoder.weights
    ]
    vocabulary = vocabulary_in(locate("t5_test"))
    given = (folder.parent / "spiece.model").read_bytes()
    assert vocabulary.read_bytes() == given


def test_a_directory_of_that_name_comes_first(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t5_test").mkdir()
    assert locate("t5_test").resolve() == (tmp_path / "t5_test").resolve()


def test_a_directory_that_may_not_be_looked_at_is_not_said_to_be_missing(
    tmp_path, monkeypatch
):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.stat", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        locate(str(tmp_path / "generator"))


@pytest.mark.parametrize("name", ["t5_tests", "empty", "", "../presets/t5_test", "."])
def test_only_names_of_models_are_names(shipped, name):
    assert presets.directory_of(name) is None


def test_the_error_for_an_unknown_name_lists_all_there_are(shipped):
    with pytest.raises(InputError, match="^t5_tests does not exist") as error:
        locate("t5_tests")
    for name in ("t5_test", *keras_preset.names()):
        assert f"{name}," in str(error.value) or f"{name})" in str(error.value)
    assert "empty" not in str(error.value)


def test_what_ships_can_be_loaded():
    for name in presets.names():
        model = T5QueryGenerator.from_preset(name)
        assert all(bool(tf.reduce_all(tf.math.is_finite(w))) for w in model.weights)
        assert vocabulary_in(locate(name)) is not None
