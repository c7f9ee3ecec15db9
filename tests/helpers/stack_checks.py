"""Checks of `tfdpsq.layers` and `tfdpsq.privacy`, run where they are installed.

Run by `other_stacks.py` in an environment of any Python and TensorFlow; it imports
nothing but what the extras bring. Prints one line of JSON: what was computed, so that
environments can be compared. Weights, data and seeds are fixed, and come from numpy.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import tempfile

import numpy as np
import tensorflow as tf

ROWS, STEPS = 12, 4


def _refusal(action, *words):
    """Requires that an action is refused in a sentence that has these words."""
    try:
        action()
    except (ImportError, ValueError) as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
        return
    raise AssertionError(f"not refused: {words}")


# -- Layers ----------------------------------------------------------------------------


def check_layers(keras):
    """Compares plain layers with numpy, and with what their configuration makes."""
    from tfdpsq import layers

    random = np.random.default_rng(0)
    hidden = random.normal(size=(3, 5, 4)).astype("float32")
    mask = np.array([[1, 1, 0, 0, 0], [1] * 5, [1, 1, 1, 0, 0]], np.int32)
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    dense = keras.layers.Dense(6, "tanh")
    dense.build((None, 5, 4))
    plain = dense(hidden)
    unit = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
    prompt = layers.SoftPrompt(2)
    longer = prompt(hidden, mask)
    vectors = np.tile(np.asarray(prompt.vectors)[None], (3, 1, 1))
    cases = {
        "MaskedMeanPooling": (layers.MaskedMeanPooling(), (hidden, mask), mean),
        "FirstTokenPooling": (layers.FirstTokenPooling(), (hidden, mask), hidden[:, 0]),
        "QueryAdapter": (layers.QueryAdapter(), (hidden,), unit),
        "Scale": (layers.Scale(5.0, learned=True), (hidden,), 5.0 * hidden),
        "SoftPrompt": (
            prompt,
            (hidden, mask),
            np.concatenate([vectors, np.asarray(longer[0])[:, 2:]], 1),
        ),
        "Folded": (layers.Folded(dense), (hidden,), plain),
        "LoRADense": (layers.LoRADense(dense, 2, 4.0), (hidden,), plain),
    }
    for name, (layer, arrays, expected) in cases.items():
        tensors = [tf.constant(array) for array in arrays]
        found = tf.nest.flatten(layer(*tensors))[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        copy = type(layer).from_config(layer.get_config())
        copy(*tensors)
        copy.set_weights(layer.get_weights())
        again = tf.nest.flatten(copy(*tensors))[0]
        np.testing.assert_array_equal(found, again, err_msg=name)
        # In a graph model, compiled, saved and loaded.
        inputs = [keras.Input(array.shape[1:], dtype=array.dtype) for array in arrays]
        output = tf.nest.flatten(layer(*inputs))[0]
        model = keras.Model(inputs, output)
        model.compile("sgd", "mse", jit_compile=True)
        np.testing.assert_allclose(
            model.predict(list(arrays), verbose=0), expected, rtol=1e-4, atol=1e-5
        )
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            loaded = keras.models.load_model(f"{folder}/model.keras")
            np.testing.assert_allclose(
                loaded.predict(list(arrays), verbose=0), expected, rtol=1e-4, atol=1e-5
            )
    dropout = layers.SeededDropout(0.5)
    drawn = []
    for seed in ([1, 2], [1, 2], [1, 3]):
        with layers.dropout_seed(seed):
            drawn.append(np.asarray(dropout(tf.ones([64, 8]), training=True)))
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.any(drawn[0] != drawn[2]) and set(np.unique(drawn[0])) == {0, 2}
    assert np.array_equal(dropout(tf.ones([2, 3]), training=False), np.ones([2, 3]))
    return {"layers": sorted(cases) + ["SeededDropout"], "dropped": _digest(drawn[0])}


def _digest(values):
    """A few numbers that follow from all values."""
    flat = np.ravel(np.asarray(values, np.float64))
    return [float(np.cos(k * np.arange(flat.size)) @ flat) for k in range(3)]


# -- The engine on a model of another project ------------------------------------------


def _classifier(keras):
    """A text classifier: embedded tokens, a convolution, attention, their mean."""
    tokens = keras.Input([9], dtype="int64", name="tokens")
    x = keras.layers.Embedding(30, 8)(tokens)
    x = keras.layers.Conv1D(8, 3, padding="same", activation="relu")(x)
    x = x + keras.layers.MultiHeadAttention(2, 4)(x, x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.Dropout(0.2)(x)
    return keras.Model(tokens, keras.layers.Dense(3)(x))


def _data(rows):
    tokens = np.random.default_rng(1).integers(0, 30, (rows, 9))
    return tokens, tokens.sum(1) % 3


def _loss(keras):
    none = keras.losses.Reduction.NONE
    return keras.losses.SparseCategoricalCrossentropy(True, reduction=none)


def _made(keras, floatx="float32"):
    keras.backend.set_floatx(floatx)
    model = _classifier(keras)
    random = np.random.default_rng(2)
    model.set_weights([0.4 * random.normal(size=w.shape) for w in model.weights])
    keras.backend.set_floatx("float32")
    return model


def _row_losses(model, loss, x, y, training):
    found = loss(y, model(x, training=training))
    return tf.reshape(found, [-1])


def check_clipping(keras):
    """Compares clipped sums with a float64 loop over examples."""
    from tfdpsq.privacy import fast

    model, twin = _made(keras), _made(keras, "float64")
    loss = _loss(keras)
    x, y = map(tf.constant, _data(ROWS))
    gradients = []
    for row in range(ROWS):
        one = slice(row, row + 1)
        with tf.GradientTape() as tape:
            value = _row_losses(twin, loss, x[one], y[one], False)
        found = tape.gradient(value, twin.trainable_variables)
        gradients.append([tf.convert_to_tensor(g).numpy() for g in found])
    norms = [np.sqrt(sum((g**2).sum() for g in row)) for row in gradients]
    clip_norm = float(np.median(norms))
    expected = [
        sum(g * min(1.0, clip_norm / norm) for g, norm in zip(column, norms))
        for column in zip(*gradients)
    ]
    worst, sums = 0.0, None
    for jit_compile in (False, True):
        run = tf.function(
            lambda: fast.clipped_sum(
                lambda: _row_losses(model, loss, x, y, False),
                [model],
                model.trainable_variables,
                clip_norm,
            ),
            jit_compile=jit_compile,
        )
        sums = [np.asarray(one) for one in run().sums]
        off = max(np.abs(one - other).max() for one, other in zip(sums, expected))
        worst = max(worst, float(off / clip_norm))
    assert worst <= 1e-5, worst
    return {"off": worst, "sums": [_digest(one / clip_norm)[0] for one in sums]}


def check_training(keras):
    """Trains privately through Keras's fit and through `train`, with its proof."""
    from tfdpsq import privacy

    rows = 80
    x, y = _data(rows)
    spec = privacy.PrivacySpec(
        epsilon=3.0,
        clip_norm=0.5,
        num_units=rows,
        n_is_public=True,
        batch_size=16,
        steps=STEPS,
    )
    plan = privacy.make_plan(spec)
    loss = _loss(keras)
    with tempfile.TemporaryDirectory() as directory:
        private = privacy.PrivateModel(_made(keras), plan, microbatch_size=8)
        before = private.model.get_weights()
        private.compile(keras.optimizers.Adam(0.05), loss=loss)
        private.fit(x, y, directory=directory)
        assert any(np.any(a != b) for a, b in zip(before, private.model.get_weights()))
        ledger = privacy.read_ledger(os.path.join(directory, "ledger.jsonl"))
        assert ledger.steps_paid == private.steps_executed == STEPS
        certificate = privacy.make_certificate(
            plan,
            STEPS,
            description="A check.",
            sensitivity_argument="Rows are clipped one by one.",
            training={"engine": "fast"},
            fingerprints={"code": privacy.code_fingerprint()},
        )
        read = json.loads(json.dumps(certificate))
        assert not privacy.verify_certificate(read).problems

    trained = {}
    for optimizer in ("sgd", "adam", "adafactor"):
        model = _made(keras)
        made = privacy.optimizers.OPTIMIZERS[optimizer](0.05)
        privacy.train(
            plan,
            lambda batch, model=model: _row_losses(
                model, loss, batch["x"], batch["y"], True
            ),
            model.trainable_variables,
            made,
            lambda at: {"x": x[at], "y": y[at]},
            microbatch_size=8,
            layers=[model],
            seed=4,
            jit_compile=optimizer == "sgd",
        )
        trained[optimizer] = [_digest(v)[0] for v in model.get_weights()]
    return {"epsilon": private.epsilon(), "trained": trained}


def check_mechanism(keras):
    """Noise of the stated deviation, the same for the same seed."""
    from tfdpsq import privacy
    from tfdpsq.privacy import step

    plan = privacy.make_plan(
        privacy.PrivacySpec(
            epsilon=1.0, clip_norm=2.0, num_units=500, batch_size=50, steps=3
        )
    )
    drawn = []
    for seed in (1, 1, 2):
        keys = privacy.RunKey(plan, seed).step_keys(0)
        drawn.append(step.privatized(plan, [tf.zeros([100_000])], [], keys)[0])
    drawn = [one.numpy() * 50 for one in drawn]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.any(drawn[0] != drawn[2])
    deviation = float(drawn[0].std() / plan.noise_stddev)
    assert abs(deviation - 1) < 0.02, deviation
    return {"noise": _digest(drawn[0]), "deviation": deviation}


def main():
    """Runs the checks, all or those of Keras 3, and prints their results."""
    from tfdpsq.keras_choice import is_keras_2, keras

    package = keras.layers.Layer.__module__.partition(".")[0]
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "tensorflow": tf.__version__,
        "keras": f"{package} {importlib.metadata.version(package)}",
        **check_layers(keras),
    }
    if is_keras_2():
        found["dp-accounting"] = importlib.metadata.version("dp-accounting")
        found.update(check_clipping(keras), **check_training(keras))
        found.update(check_mechanism(keras))
    else:
        said = ("needs Keras 2", "pip install tf_keras")
        _refusal(lambda: importlib.import_module("tfdpsq.privacy"), *said)
        from tfdpsq import layers

        inputs = keras.Input([3])
        model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
        _refusal(lambda: layers.apply_lora(model, 2, 2.0, ["*"]), *said)
        _refusal(lambda: layers.train_only(model, ["*"]), *said)
        found["refused"] = ["tfdpsq.privacy", "apply_lora", "train_only"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
