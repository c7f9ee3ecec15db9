"""Which Keras is used, decided in fresh processes, and what each refusal says."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf
from helpers import forking

from tfdpsq import keras_choice, layers
from tfdpsq.privacy import PrivacySpec, PrivateModel, make_plan
from tfdpsq.validation import InputError

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A TensorFlow without weight whose `tf.keras` is what the test says.
_STAND_IN = """
import sys, types
tf = types.ModuleType("tensorflow")
tf.Module, tf.__version__ = type("Module", (), {}), "2.99.0"
sys.modules["tensorflow"] = tf
def keras(name, base):
    made = types.ModuleType(name)
    made.layers = types.SimpleNamespace(Layer=type("Layer", (base,), {}))
    made.layers.Layer.__module__ = name + ".layers"
    return made
keras2 = keras("tf_keras", tf.Module)
keras3 = keras("keras", object)
"""


def _chosen(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", _STAND_IN + code],
        env={**os.environ, "TF_USE_LEGACY_KERAS": "", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


_USE = "from tfdpsq.keras_choice import {name}; print({name}.__name__)"


@pytest.mark.parametrize(
    ("environment", "setting", "expected"),
    [
        ("tf.keras = keras2", "", "tf_keras"),
        ("tf.keras = keras3; sys.modules['tf_keras'] = keras2", "", "tf_keras"),
        ("tf.keras = keras3; sys.modules['tf_keras'] = keras2", "0", "keras"),
    ],
)
def test_keras_2_is_preferred_unless_the_switch_says_otherwise(
    environment, setting, expected
):
    use = f"{environment}\n{_USE.format(name='keras')}"
    assert _chosen(use, TF_USE_LEGACY_KERAS=setting) == expected


_HIDE = """
import builtins
real = builtins.__import__
def hiding(name, *rest, **named):
    if name == "tf_keras":
        raise ModuleNotFoundError("No module named 'tf_keras'", name=name)
    return real(name, *rest, **named)
builtins.__import__ = hiding
"""


def test_without_keras_2_the_layers_have_keras_3_and_the_engine_none():
    alone = f"{_HIDE}tf.keras = keras3\n"
    assert _chosen(alone + _USE.format(name="keras")) == "keras"
    refused = _chosen(alone + "import tfdpsq.privacy")
    assert "pip install tf_keras" in refused


def test_models_of_keras_3_are_refused(monkeypatch):
    class Layer:
        pass

    Layer.__module__ = "keras.src.layers.layer"
    model = type("Functional", (Layer,), {})()
    plan = make_plan(PrivacySpec(8.0, 1.0, num_units=40, batch_size=8, steps=2))
    for use in (
        lambda: PrivateModel(model, plan),
        lambda: layers.apply_lora(model, 2, 2.0, ["*"]),
        lambda: layers.train_only(model, ["*"]),
    ):
        with pytest.raises(InputError, match="of another Keras.*build it with keras"):
            use()
    keras_choice.require_own("layers", tf.Module())  # not of any Keras


@pytest.mark.slow
def test_models_of_the_other_keras_2_are_refused(tmp_path):
    """In a process of its own: to import it changes how the first one loads layers."""
    pytest.importorskip("tensorflow_privacy")  # the pinned stack, whose Keras is 2
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    code = "import tf_keras\nfrom tfdpsq import layers\n"
    code += "layers.train_only(tf_keras.Sequential(), ['*'])"
    script = tmp_path / "other.py"
    script.write_text(code)
    variables = {**os.environ, "TF_USE_LEGACY_KERAS": ""}
    done = forking.run([sys.executable, script], cwd=ROOT, env=variables)
    assert "of another Keras, the package tf_keras" in done.stderr, done.stderr
