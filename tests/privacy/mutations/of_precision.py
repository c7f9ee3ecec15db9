"""Mistakes in rounding: a row moves the sum by more than the clip norm."""

_FAST = "tfdpsq/privacy/fast/"
_TESTS = "tests/privacy/"

MUTATIONS = (
    {
        "name": "error_of_norms_left_out",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "return Squared(norm, slack * absolute, magnitude)",
        "new": "return Squared(norm, 0 * slack * absolute, magnitude)",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_no_row_adds_more_than_the_clip_norm[float32-attention]",
        ),
        "why": "on a device that rounds, half of all rows are longer than C",
    },
    {
        "name": "error_of_norms_subtracted",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "tf.sqrt(norm + error + _TINY_SQUARE)",
        "new": "tf.sqrt(norm - error + _TINY_SQUARE)",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_no_row_adds_more_than_the_clip_norm[float32-dense]",
        ),
        "why": "the bound is one from the wrong side",
    },
    {
        "name": "rounding_of_the_sum_left_out",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": """\
    bounds += (rounding + rounding * rounding) * tf.sqrt(magnitude)
""",
        "new": """\
    bounds += 0 * rounding
""",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_no_row_adds_more_than_the_clip_norm[bfloat16-narrow]",
        ),
        "why": "a row enters the sum longer than its norm was",
    },
    {
        "name": "gram_norm_rounded_to_zero",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "return Squared(norm, slack * absolute, magnitude)",
        "new": "return Squared(norm, tf.sign(norm) * slack * absolute, magnitude)",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_a_gram_norm_of_zero_does_not_let_a_row_pass",
        ),
        "why": "a gradient whose norm cancels is not clipped at all",
    },
    {
        "name": "squares_that_vanish_forgotten",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "_TINY_SQUARE = 2.0**-100, 2.0**-90",
        "new": "_TINY_SQUARE = 0.0, 0.0",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_no_row_adds_more_than_the_clip_norm[float32-shared_embedding]",
        ),
        "why": "inputs of 1e-20 have no length in float32, whatever they meet",
    },
    {
        "name": "factor_from_the_computed_norm",
        "kind": "precision",
        "file": _FAST + "engine.py",
        "old": "dict.fromkeys(uses, (clip_norm, bounds))",
        "new": "dict.fromkeys(uses, (clip_norm, norms))",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_no_row_adds_more_than_the_clip_norm[tensor_float_32-attention]",
        ),
        "why": "the bound is computed and not used",
    },
    {
        "name": "roundoff_of_another_format",
        "kind": "precision",
        "file": _FAST + "products.py",
        "old": 'Arithmetic("bfloat16", 2.0**-8,',
        "new": 'Arithmetic("bfloat16", 2.0**-11,',
        "tests": (
            _TESTS + "test_products.py::"
            "test_units_of_roundoff_are_those_of_the_formats",
        ),
        "why": "bfloat16 is eight times as coarse as TensorFloat-32",
    },
    {
        "name": "roundoff_of_another_device",
        "kind": "precision",
        "file": _FAST + "products.py",
        "old": """\
        return _TENSOR_FLOAT_32
""",
        "new": """\
        return _FLOAT32
""",
        "tests": (
            _TESTS + "test_products.py::"
            "test_the_precision_presumed_is_that_of_the_device",
        ),
        "why": "a GPU rounds operands to 11 bits, where it may",
    },
    {
        "name": "xla_left_at_its_default_precision",
        "kind": "precision",
        "file": _FAST + "products.py",
        "old": "[xla.PrecisionConfig.HIGHEST] * 2",
        "new": "[xla.PrecisionConfig.DEFAULT] * 2",
        "tests": (
            _TESTS + "test_products.py::test_xla_is_asked_for_the_highest_precision",
        ),
        "why": "a TPU then multiplies float32 in one pass of bfloat16",
    },
    {
        "name": "factors_left_to_xla",
        "kind": "precision",
        "file": _FAST + "factored.py",
        "old": "type(use)(*map(products.pinned, use)) for use",
        "new": "use for use",
        "tests": (
            _TESTS + "test_products.py::test_what_is_summed_is_what_is_pinned[fast]",
        ),
        "why": "XLA may recompute the values for the sum, and round them differently",
    },
    {
        "name": "coupled_gradients_left_to_xla",
        "kind": "precision",
        "file": "tfdpsq/privacy/coupled.py",
        "old": "products.pinned(factored.full_precision(",
        "new": "(factored.full_precision(",
        "tests": (
            _TESTS + "test_products.py::test_what_is_summed_is_what_is_pinned[coupled]",
        ),
        "why": "as above, of the naive direct method",
    },
    {
        "name": "jacobian_left_to_xla",
        "kind": "precision",
        "file": "tfdpsq/privacy/jacobian.py",
        "old": "products.pinned(tf.where(column, j, 0))",
        "new": "tf.where(column, j, 0)",
        "tests": (
            _TESTS
            + "test_products.py::test_what_is_summed_is_what_is_pinned[vectorized]",
        ),
        "why": "as above, of tensorflow-privacy's engines",
    },
    {
        "name": "nothing_is_pinned",
        "kind": "precision",
        "file": _FAST + "products.py",
        "old": "return xla.optimization_barrier(values)[0]",
        "new": "return values",
        "tests": (
            _TESTS + "test_products.py::test_xla_is_asked_to_make_what_is_pinned_once",
        ),
        "why": "XLA may recompute the values for the sum",
    },
    {
        "name": "compiled_sum_without_factors",
        "kind": "precision",
        "file": _FAST + "products.py",
        "old": "tf.reduce_sum(rows * column, axis=0)",
        "new": "tf.reduce_sum(rows, axis=0)",
        "tests": (
            _TESTS + "test_products.py::test_a_compiled_sum_of_rows_is_the_product",
        ),
        "why": "gradients that were formed are not clipped where XLA compiles",
    },
    {
        "name": "squares_of_a_matrix_added_without_rounding",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "if double else block\n",
        "new": "if double else 1\n",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_rows_that_lose_all_they_can_stay_below_the_bound[a matrix]",
        ),
        "why": "each of up to 4,096 additions may lose a last bit",
    },
    {
        "name": "second_sum_of_float64_not_counted",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "block + length // block * width if double else block",
        "new": "block",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_rows_in_float64_that_lose_all_they_can_stay_below_the_bound",
        ),
        "why": "float64 has no wider type to add in",
    },
    {
        "name": "second_axis_of_float64_not_counted",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "return 2 * length if double else length",
        "new": "return length",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_rows_in_float64_that_lose_all_they_can_stay_below_the_bound",
        ),
        "why": "as above, of gradients in factors",
    },
    {
        "name": "sum_bypasses_precision",
        "kind": "precision",
        "file": _FAST + "factored.py",
        "old": """\
    total = products.product(
        tf.reshape(left""",
        "new": """\
    total = tf.matmul(
        tf.reshape(left""",
        "tests": (
            _TESTS + "test_products.py::"
            "test_no_product_bypasses_the_module_that_knows_its_precision",
        ),
        "why": "a TPU then sums what it never measured",
    },
    {
        "name": "tensor_float_32_left_on",
        "kind": "precision",
        "file": "tfdpsq/privacy/compiled.py",
        "old": "return fast.true_float32() if private else",
        "new": "return contextlib.nullcontext() if private else",
        "tests": (
            _TESTS + "test_products.py::"
            "test_a_private_step_turns_tensor_float_32_off_and_on_again",
        ),
        "why": "factors that were traced for float32 meet TensorFloat-32",
    },
    {
        "name": "mixed_weights_bounded_as_float64",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "coarsest = tf.float32 if single else tf.float64",
        "new": "coarsest = dtype",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_weights_of_two_types_are_bounded_as_the_coarser_one",
        ),
        "why": "a factor that is rounded up to float32 lets a row add more than C",
    },
    {
        "name": "roundings_of_inputs_left_out",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "steps, made = steps + products.chain(use.left.shape[-1]), 2",
        "new": "steps, made = steps, 2",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_rows_that_lose_all_they_can_stay_below_the_bound[wide inputs]",
        ),
        "why": "a row of a wide layer is longer than its bound",
    },
    {
        "name": "roundings_of_gradients_left_out",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "steps, made = products.chain(use.right.shape[-1]), 1",
        "new": "steps, made = 0, 1",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_rows_that_lose_all_they_can_stay_below_the_bound[wide gradients]",
        ),
        "why": "a row of a wide layer is longer than its bound",
    },
    {
        "name": "cross_terms_left_out_of_the_error",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "squares.append(2 * lengths[0] * lengths[1])",
        "new": "squares.append(lengths[0] * lengths[1])",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_rows_that_lose_all_they_can_stay_below_the_bound[both]",
        ),
        "why": "rows of a tied embedding are longer than their bound",
    },
    {
        "name": "roundings_over_positions_left_out",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "widths + positions + 5",
        "new": "widths + 5",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_rows_that_lose_all_they_can_stay_below_the_bound[positions]",
        ),
        "why": "a row of many tokens is longer than its bound",
    },
    {
        "name": "roundings_of_the_factor_left_out",
        "kind": "precision",
        "file": _FAST + "gradient_norms.py",
        "old": "bounds * (1 + 8 * np.finfo(coarsest.as_numpy_dtype).eps)",
        "new": "bounds",
        "tests": (
            _TESTS + "test_precision.py::"
            "test_what_follows_from_the_bound_is_rounded_as_well",
        ),
        "why": "a factor that is rounded up lets a row add more than C",
    },
    {
        "name": "panels_summed_without_rounding",
        "kind": "precision",
        "file": _FAST + "products.py",
        "old": "min(terms, _PANEL) + (terms - 1) // _PANEL",
        "new": "min(terms, _PANEL)",
        "tests": (
            _TESTS + "test_products.py::"
            "test_a_chain_is_as_long_as_the_roundings_that_a_term_meets[99999]",
        ),
        "why": "a row of a very wide layer is longer than its bound",
    },
    {
        "name": "three_words_taken_for_exact",
        "kind": "precision",
        "file": _FAST + "products.py",
        "old": '"float32 (XLA, highest)", 2.0**-22',
        "new": '"float32 (XLA, highest)", 0.0',
        "tests": (
            _TESTS + "test_products.py::"
            "test_three_bfloat16_words_lose_no_more_than_is_presumed",
        ),
        "why": "what a TPU leaves out of its products is missing in the bound",
    },
    {
        "name": "products_rewritten_to_16_bits",
        "kind": "precision",
        "file": _FAST + "products.py",
        "old": "set_experimental_options(dict.fromkeys(to_16_bits, False))",
        "new": "get_experimental_options()",
        "tests": (
            _TESTS + "test_products.py::test_products_are_not_rewritten_to_16_bits",
        ),
        "why": "TensorFlow's automatic mixed precision multiplies in 8 bits what is "
        "bounded as 24",
    },
    {
        "name": "fast_math_is_let_pass",
        "kind": "precision",
        "file": "tfdpsq/privacy/step.py",
        "old": "        products.require_true_arithmetic()\n",
        "new": "        pass\n",
        "tests": (
            "tests/privacy/test_products.py::test_a_process_whose_floating_point_is_another_one_is_refused",
        ),
        "why": "a row without a finite gradient moves the weights without bound",
    },
)
