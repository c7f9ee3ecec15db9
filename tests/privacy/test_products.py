"""The products that clipping depends on: all in one module, which knows its device."""

import ast
import math
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import fast_oracle as oracle
from helpers.rounding import DEVICES, rounded

from tfdpsq import privacy
from tfdpsq.privacy import compiled, coupled, fast, jacobian, step
from tfdpsq.privacy.fast import products
from tfdpsq.validation import InputError

layers = tf.keras.layers
PACKAGE = pathlib.Path(products.__file__).parents[2]


# Products of the forward pass, whose precision is part of the function, and those
# that `products` makes itself: (file, function) and how many stand there.
_FORWARD = {
    ("privacy/fast/keras_nlp_rules.py", "reversible_embedding"): 1,
    ("privacy/fast/keras_rules.py", "dense"): 2,
    ("privacy/fast/keras_rules.py", "einsum_dense"): 1,
    ("privacy/fast/keras_rules.py", "convolution"): 1,
    ("privacy/fast/keras_rules.py", "depthwise_convolution"): 1,
    ("privacy/fast/products.py", "product"): 2,
    ("privacy/fast/products.py", "einsum"): 1,
    ("privacy/fast/products.py", "formed"): 1,
    ("retriever/direct_losses.py", "NaiveLosses"): 1,
    ("retriever/direct_losses.py", "GroupLosses"): 1,
}
_PRODUCT = re.compile(
    r"^(matmul|einsum|tensordot|matvec|dot|vdot|inner|outer|dot_general)$|conv\dd|"
    r"^convolution_op$"
)


def _products_in(source):
    """{top-level function or class: products that it makes by itself}."""
    found = {}
    for node in ast.parse(source).body:
        count = 0
        for part in ast.walk(node):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult):
                count += 1
            if not isinstance(part, ast.Call):
                continue
            owner, _, name = ast.unparse(part.func).rpartition(".")
            if owner not in ("products", "record") and _PRODUCT.search(name):
                count += 1
        if count:
            found[getattr(node, "name", "the module")] = count
    return found


def test_no_product_bypasses_the_module_that_knows_its_precision():
    files = [
        *(PACKAGE / "privacy").rglob("*.py"),
        PACKAGE / "retriever" / "direct_dp.py",
        PACKAGE / "retriever" / "direct_losses.py",
    ]
    found = {}
    for path in files:
        for name, count in _products_in(path.read_text("utf-8")).items():
            found[path.relative_to(PACKAGE).as_posix(), name] = count
    assert found == _FORWARD


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("tf.matmul(a, b)", 1),
        ("a @ b", 1),
        ("tf.linalg.einsum('ab,ab->a', a, b)", 1),
        ("tf.nn.conv2d(a, b)", 1),
        ("products.product(a, b) + products.einsum('ab,ab->a', a, b)", 0),
    ],
)
def test_a_product_that_bypasses_it_is_found(line, count):
    found = _products_in(f"def function(a, b):\n    return {line}\n")
    assert found.get("function", 0) == count


@pytest.mark.parametrize(
    ("gpus", "tpus", "tensor_float_32", "compiled", "expected"),
    [
        (0, 0, True, False, products._FLOAT32),
        (0, 0, True, True, products._FLOAT32),
        (1, 0, True, False, products._TENSOR_FLOAT_32),
        (1, 0, False, False, products._FLOAT32_ELSEWHERE),
        (1, 0, True, True, products._HIGHEST),
        (0, 1, False, False, products._BFLOAT16),
        (0, 1, False, True, products._HIGHEST),
    ],
)
def test_the_precision_presumed_is_that_of_the_device(
    gpus, tpus, tensor_float_32, compiled, expected, monkeypatch
):
    devices = {"GPU": [None] * gpus, "TPU": [None] * tpus}
    monkeypatch.setattr(tf.config, "list_logical_devices", devices.__getitem__)
    experimental = tf.config.experimental
    before = experimental.tensor_float_32_execution_enabled()
    experimental.enable_tensor_float_32_execution(tensor_float_32)
    seen = []

    def look(x):
        seen.append(products.arithmetic(tf.float32))
        return x

    try:
        tf.function(look, jit_compile=compiled)(1.0)
        with products.true_float32():
            inside = products.arithmetic(tf.float32)
        after = experimental.tensor_float_32_execution_enabled()
    finally:
        experimental.enable_tensor_float_32_execution(before)
    assert seen[0] == expected
    assert inside.operand == (2.0**-8 if tpus else 0)
    assert after == tensor_float_32
    assert products.arithmetic(tf.float64).operand == 0


@pytest.mark.parametrize(
    "rewrite", ["auto_mixed_precision", "auto_mixed_precision_onednn_bfloat16"]
)
def test_products_are_not_rewritten_to_16_bits(rewrite):
    """TensorFlow rewrites after tracing, which `arithmetic` cannot see.

    Bounded as float32 and multiplied in bfloat16, rows add up to 1.05 C: see
    `test_without_the_error_bound_rows_would_add_more`.
    """
    options = tf.config.optimizer
    options.set_experimental_options({rewrite: True})
    try:
        with pytest.raises(KeyError), products.true_float32():
            inside = options.get_experimental_options()[rewrite]
            raise KeyError
        after = options.get_experimental_options()[rewrite]
    finally:
        options.set_experimental_options({rewrite: False})
    assert not inside
    assert after


@pytest.mark.parametrize(
    "name, value, refused",
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", True),
        ("XLA_FLAGS", "--xla_x=1 --xla_cpu_enable_fast_math", True),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_x=1", False),
        ("XLA_FLAGS", "a file", True),
        ("XLA_FLAGS", "no file", False),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", True),
        ("DNNL_DEFAULT_FPMATH_MODE", "any", True),
        ("TF_SET_ONEDNN_FPMATH_MODE", "BF16", True),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT", False),
    ],
)
def test_a_process_whose_floating_point_is_another_one_is_refused(
    monkeypatch, tmp_path, name, value, refused
):
    """Under fast math one row with NaN made all weights NaN."""
    (tmp_path / "a file").write_text("--xla_x=1\n--xla_cpu_enable_fast_math=true\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    plan = privacy.make_plan(
        privacy.PrivacySpec(
            epsilon=8.0, clip_norm=1.0, num_units=8, batch_size=4, steps=1
        )
    )
    weight = tf.Variable(1.0)
    optimizer = privacy.make_optimizer(plan, 0.1, "sgd", engine="vectorized")

    def make():
        return privacy.make_logical_step(
            lambda batch: weight * batch["x"], [weight], optimizer, 4
        )

    if not refused:
        make()
        return
    with pytest.raises(InputError, match=f"{name} (has|is) '"):
        make()


def test_units_of_roundoff_are_those_of_the_formats():
    """Emulated: no number moves by more than p, and some by nearly that (RNE)."""
    values = np.random.default_rng(0).uniform(1, 2, 10_000).astype(np.float32)
    for bits, (_, unit, _) in DEVICES.values():
        off = np.abs(rounded(values, bits).astype(np.float64) / values - 1)
        assert np.max(off) <= unit
        assert np.max(off) >= 0.45 * unit  # a GPU may truncate: twice as much
    one = tf.constant(values)
    back = tf.cast(tf.cast(one, tf.bfloat16), tf.float32)
    np.testing.assert_array_equal(back, rounded(values, 7))


@pytest.mark.parametrize("width", [1, 7, 1023, 1024, 1025, 2048, 2049, 5000, 99_999])
def test_a_chain_is_as_long_as_the_roundings_that_a_term_meets(width, monkeypatch):
    """`gram` runs on numbers of roundings: a sum has those of its worst term.

    An inner product of w terms makes w of them at most, a multiplication and w - 1
    additions; k results that are added up make k - 1 more.
    """

    def rounded_sum(one, other, transpose_b):
        return np.float64(one.shape[-1])

    monkeypatch.setattr(products, "product", rounded_sum)
    monkeypatch.setattr(tf, "add_n", lambda parts: max(parts) + len(parts) - 1)
    values = np.zeros([1, 1, width], np.float32)
    assert products.chain(width) == products.gram(values, values)


@pytest.mark.parametrize("cut_off", [False, True])
def test_three_bfloat16_words_lose_no_more_than_is_presumed(cut_off):
    """Six of the nine products of two float32s, three words each, are made.

    In the last of the values all bits of the words but the first are ones.
    """
    values = np.random.default_rng(0).uniform(1, 1.02, 100_000).astype(np.float32)
    values = np.concatenate([values, 1.7 * values, [np.float32(1 + 2**-7 - 2**-23)]])
    words, rest = [], values.astype(np.float32)
    for _ in range(3):
        bits = rest.view(np.uint32) & np.uint32(0xFFFF0000)
        words.append(bits.view(np.float32) if cut_off else rounded(rest, 7))
        rest = rest - words[-1]
    assert np.all(rest == 0)
    one, two, three = (word.astype(np.float64) for word in words)
    exact = values.astype(np.float64) ** 2
    made = one * one + 2 * one * two + two * two + 2 * one * three
    off = np.max(np.abs(made / exact - 1))
    allowed = 2 * products._HIGHEST.operand
    assert off <= allowed
    assert off >= allowed * (0.9 if cut_off else 0.1)


def test_xla_is_asked_for_the_highest_precision():
    """Every product that the engine makes in a compiled sum carries it."""
    model, _, x = oracle.made("dense, wide")
    x = tf.constant(oracle.single(x))

    def clipped():
        return fast.clipped_sum(
            lambda: oracle.losses(model, x), [model], model.trainable_variables, 0.1
        )

    graph = tf.function(clipped, jit_compile=True).get_concrete_function().graph
    dots = [op for op in graph.get_operations() if op.type.startswith("XlaDot")]
    for dot in dots:
        config = products.xla.PrecisionConfig.FromString(
            dot.get_attr("precision_config")
        )
        assert (
            list(config.operand_precision) == [products.xla.PrecisionConfig.HIGHEST] * 2
        )
    # A Gram matrix each of inputs and gradients of two kernels, and their sums.
    assert len(dots) == 2 * 3


def test_xla_is_asked_to_make_what_is_pinned_once():
    function = tf.function(lambda x: products.pinned(2 * x), jit_compile=True)
    concrete = function.get_concrete_function(tf.ones([3, 4]))
    result = concrete.structured_outputs
    while result.op.type == "Identity":
        result = result.op.inputs[0]
    assert result.op.type == "XlaOptimizationBarrier"
    np.testing.assert_array_equal(function(tf.ones([3, 4])), np.full([3, 4], 2))


@pytest.mark.parametrize("engine", ["fast", "vectorized", "coupled"])
def test_what_is_summed_is_what_is_pinned(engine, monkeypatch):
    """Where nothing but zeros comes out of `pinned`, nothing but zeros is summed."""
    # An embedding, a gradient that stays in factors, and one that is formed.
    parts = [layers.Embedding(7, 40), layers.Dense(40, "tanh"), layers.Dense(3)]
    model = tf.keras.Sequential(parts)
    ids = tf.constant([[1, 2, 3, 1], [4, 5, 6, 0]])
    model(ids)

    def losses():
        return tf.reduce_sum(model(ids), [1, 2])

    def gradient(counted, variables):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(counted * losses())
        return tape.gradient(total, variables)

    def summed():
        variables = model.trainable_variables
        if engine == "coupled":
            found = privacy.Coupled(losses(), gradient)
            return coupled.clipped_sum(found, variables, 0.1, tf.ones([2]))
        if engine == "vectorized":
            with jacobian.FiniteTape(tf.GradientTape()) as finite:
                values = losses()
            return [tf.reduce_sum(j, 0) for j in finite.jacobian(values, variables)]
        found = fast.clipped_sum(losses, [model], variables, 0.1)
        assert np.all(found.norms.numpy() == 0) == zeros
        return found.sums

    zeros = False
    assert all(np.any(tf.convert_to_tensor(total) != 0) for total in summed())
    monkeypatch.setattr(products, "pinned", tf.zeros_like)
    zeros = True
    assert all(np.all(tf.convert_to_tensor(total) == 0) for total in summed())


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("shape", [[7], [7, 3], [7, 5, 4], [7, 2, 3, 4]])
def test_a_compiled_sum_of_rows_is_the_product(shape, dtype):
    random = np.random.default_rng(0)
    factors = random.uniform(0, 1, [7])
    rows = random.normal(size=shape)
    given = tf.constant(factors, dtype), tf.constant(rows, dtype)
    expected = np.tensordot(factors, rows, [[0], [0]])
    for jit_compile in (False, True):
        summed = tf.function(products.sum_of_rows, jit_compile=jit_compile)(*given)
        assert summed.dtype == dtype
        tolerance = 1e-6 if dtype == tf.float32 else 1e-14
        np.testing.assert_allclose(summed, expected, tolerance, tolerance)


def test_a_private_step_turns_tensor_float_32_off_and_on_again():
    experimental = tf.config.experimental
    seen = []

    def look():
        seen.append(experimental.tensor_float_32_execution_enabled())
        return np.float32(0)

    def per_example_losses(batch):
        look()
        zero = tf.reshape(tf.numpy_function(look, [], tf.float32), [])
        return layer(batch["x"])[:, 0] + zero

    layer = layers.Dense(1)
    layer.build([None, 3])
    before = experimental.tensor_float_32_execution_enabled()
    experimental.enable_tensor_float_32_execution(True)
    try:
        for epsilon, noise in ((8.0, 1.0), (math.inf, 0.0)):
            spec = privacy.PrivacySpec(
                epsilon=epsilon, clip_norm=0.1, num_units=400, batch_size=4, steps=1
            )
            plan = privacy.PrivacyPlan(spec, 4, noise)
            steps = compiled.CompiledSteps(
                plan,
                step.Setup(
                    per_example_losses,
                    layer.trainable_variables,
                    [layer],
                    privacy.make_optimizer(plan, 1e-3, "sgd"),
                    microbatch_size=4,
                ),
                jit_compile=False,
            )
            batch = {
                "x": np.ones([4, 3], np.float32),
                "weights": np.ones(4, np.float32),
            }
            seen.clear()
            steps.build(batch)
            steps([batch], [4], [[]], 0)
            # Once when it was traced, once when it ran.
            assert seen == [math.isinf(epsilon)] * 2
            assert experimental.tensor_float_32_execution_enabled()
    finally:
        experimental.enable_tensor_float_32_execution(before)
