"""Mistakes in clipping: a unit moves the sum by more than it is accounted for."""

_FAST = "tfdpsq/privacy/fast/"
_TESTS = "tests/privacy/"
_PER_LAYER = _TESTS + "test_per_layer.py::"
_INDEPENDENCE = "tests/privacy/test_independence.py::"

MUTATIONS = (
    {
        "name": "clip_without_cross_terms",
        "kind": "ties",
        "file": _FAST + "engine.py",
        "old": """\
    squared = {key: gradient_norms.squared_norms(uses[key]) for key in uses}
""",
        "new": """\
    squared = {
        (key, number): gradient_norms.squared_norms([use])
        for key in by_rows
        for number, use in enumerate(by_rows[key])
    }
""",
        "tests": (
            _TESTS + "test_fast_layers.py::"
            "test_norms_of_each_weight_equal_a_naive_float64_loop[reusing]",
        ),
        "why": "a weight used twice has a norm that is off either way, T5's "
        "embedding above all",
    },
    {
        "name": "cross_terms_of_lookups_and_products_left_out",
        "kind": "ties",
        "file": _FAST + "gradient_norms.py",
        "old": "            terms.append(2 * _total(met * products.gram(",
        "new": "            terms.append(0 * _total(met * products.gram(",
        "tests": (
            _TESTS + "test_fast_layers.py::"
            "test_norms_of_each_weight_equal_a_naive_float64_loop[language]",
        ),
        "why": "an embedding that is tied to the logits is one weight",
    },
    {
        "name": "second_forward_for_norms",
        "kind": "clipping",
        "file": _FAST + "engine.py",
        "old": """\
    finite = tf.math.is_finite(bounds)
""",
        "new": """\
    if not getattr(clipped_sum, "again", False):
        clipped_sum.again = True
        norms = clipped_sum(per_example_losses, layers, variables, clip_norm).norms
        bounds = norms
        clipped_sum.again = False
    finite = tf.math.is_finite(bounds)
""",
        "tests": (
            _TESTS + "test_fast.py::test_dropout_masks_are_those_of_the_same_forward",
        ),
        "why": "with dropout it clips the gradient of one function by the norm of "
        "another, and nothing is bounded",
    },
    {
        "name": "unregistered_layer_skipped",
        "kind": "clipping",
        "file": _FAST + "engine.py",
        "old": "    for stray in (*strays, *recorder.strays):",
        "new": "    for stray in ():",
        "tests": (
            _TESTS + "test_fast.py::"
            "test_a_weight_without_a_rule_is_named_until_a_rule_is_registered",
        ),
        "why": "a weight that no rule covers would stay as it is, in silence",
    },
    {
        "name": "stray_of_second_run_skipped",
        "kind": "clipping",
        "file": _FAST + "engine.py",
        "old": "    for stray in (*strays, *recorder.strays):",
        "new": "    for stray in strays:",
        "tests": (
            _TESTS + "test_fast_refusals.py::"
            "test_a_weight_used_outside_its_layer_is_found_on_the_second_run",
        ),
        "why": "a weight that no rule covers would be hidden by rematerialisation",
    },
    {
        "name": "second_run_waits_for_all_rows",
        "kind": "clipping",
        "file": "tfdpsq/rematerialization.py",
        "old": "    zero = tf.where(tf.math.is_nan(first), tiny, tf.zeros_like(tiny))",
        "new": "    zero = 0 * first + 0 * tf.reduce_sum(first)",
        "tests": (
            "tests/test_rematerialization.py::"
            "test_a_bad_gradient_stays_with_its_example",
        ),
        "why": "one example's NaN would spoil the gradients of all others",
    },
    {
        "name": "second_run_unrecorded",
        "kind": "clipping",
        "file": _FAST + "recorder.py",
        "old": "        for key, uses in self._finished.items():",
        "new": "        for key, uses in {}.items():",
        "tests": (
            _TESTS + "test_fast_t5.py::"
            "test_norms_and_clipped_sums_equal_a_naive_float64_loop",
        ),
        "why": "rematerialised layers would neither be trained nor count in the norm",
    },
    {
        "name": "norms_in_half_precision",
        "kind": "clipping",
        "file": _FAST + "factored.py",
        "old": "    return values if values.dtype == tf.float64 else "
        "tf.cast(values, tf.float32)",
        "new": "    return values",
        "tests": (
            _TESTS + "test_fast.py::"
            "test_mixed_precision_takes_norms_and_sums_in_float32",
        ),
        "why": "sums of squares in eight bits are off by per cents",
    },
    {
        "name": "nan_propagates",
        "kind": "clipping",
        "file": "tfdpsq/privacy/jacobian.py",
        "old": "        finite = tf.math.is_finite(squared)",
        "new": "        finite = tf.fill(tf.shape(squared), True)",
        "tests": (
            _TESTS + "test_optimizers.py::"
            "test_a_row_without_a_finite_gradient_costs_nobody_else[dpkeras-False]",
        ),
        "why": "one row's infinity becomes the whole sum's NaN, as in "
        "tensorflow-privacy, and its presence shows in every weight",
    },
    {
        "name": "nan_propagates_in_the_fast_engine",
        "kind": "clipping",
        "file": _FAST + "engine.py",
        "old": "            tf.reduce_all(finite),\n",
        "new": "            tf.constant(True),\n",
        "tests": (
            _TESTS + "test_optimizers.py::"
            "test_a_row_without_a_finite_gradient_costs_nobody_else[fast-False]",
        ),
        "why": "a factor 0 does not silence a NaN",
    },
    {
        "name": "mixed_float16_accepted",
        "kind": "clipping",
        "file": "tfdpsq/privacy/model.py",
        "old": '        if "mixed_float16" in policies:\n',
        "new": "        if False:\n",
        "tests": (_TESTS + "test_model.py::test_mixed_float16_is_refused",),
        "why": "losses are scaled for it, and clipped at another norm",
    },
    {
        "name": "negative_row_numbers_in_groups",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "if len(rows) and rows[0] < 0:",
        "new": "if False:",
        "tests": (_TESTS + "test_sampling.py::test_rows_of_groups_count_from_zero",),
        "why": "-1 is the last row by another name, and two units own it",
    },
    {
        "name": "rows_in_one_microbatch_left_out_with_a_nan",
        "kind": "clipping",
        "file": "tfdpsq/privacy/compiled.py",
        "old": " or plan.spec.sensitivity_multiplier == 1\n",
        "new": "\n",
        "tests": (
            _TESTS + "test_optimizers.py::test_rows_that_stay_together_"
            "spare_each_other_if_nothing_is_declared[dpkeras]",
        ),
        "why": "one unit then moves the sum by a whole batch of clip norms",
    },
    {
        "name": "rows_beside_a_nan_left_out_with_it",
        "kind": "clipping",
        "file": "tfdpsq/privacy/step.py",
        "old": "if not self.spares_others or clipped.complete is True:",
        "new": "if True:",
        "tests": (
            _TESTS + "test_optimizers.py::"
            "test_a_row_without_a_finite_gradient_costs_nobody_else[dpkeras-False]",
        ),
        "why": "one unit then moves the sum by a whole microbatch of clip norms",
    },
    {
        "name": "padding_rows_counted",
        "kind": "weights",
        "file": "tfdpsq/privacy/terms.py",
        "old": "tf.where(weights > 0, 1.0, 0.0)",
        "new": "tf.ones_like(weights)",
        "tests": (
            _TESTS + "test_optimizers.py::test_padding_rows_change_nothing[fast]",
        ),
        "why": "rows that nobody owns take part in training",
    },
    {
        "name": "padding_rows_counted_by_jacobians",
        "kind": "weights",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": """\
                # `where` rather than a product, as 0 · NaN would not be.
                losses = tf.where(weights > 0, require_rows(found), 0.0)
""",
        "new": """\
                losses = require_rows(found)
""",
        "tests": (
            _TESTS + "test_optimizers.py::test_padding_rows_change_nothing[dpkeras]",
        ),
        "why": "rows that nobody owns take part in training",
    },
    {
        "name": "padding_rows_filled_with_row_zero",
        "kind": "weights",
        "file": "tfdpsq/privacy/batches.py",
        "old": "    weights[: draw.count] = draw.weights[: draw.count]",
        "new": "    weights[:] = 1",
        "tests": (
            _TESTS + "test_training.py::"
            "test_padding_rows_hold_zeros_and_not_row_zero_of_the_data",
        ),
        "why": "row 0 is in every batch that is not full, many times over",
    },
    {
        "name": "num_microbatches_below_batch_at_sensitivity_c",
        "kind": "clipping",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": """\
            averaged = parent._compute_gradients(
                self, by_unit, variables, tape=finite_tape
            )
            # The parent divides by the number of units; undo it exactly once.
            sums = [gradient * float(by_unit.shape[0]) for gradient, _ in averaged]
""",
        "new": """\
            self._num_microbatches = by_unit.shape[0] // 2
            averaged = parent._compute_gradients(
                self, by_unit, variables, tape=finite_tape
            )
            sums = [
                gradient * float(self._num_microbatches) for gradient, _ in averaged
            ]
""",
        "tests": (
            _TESTS + "test_optimizers.py::"
            "test_clipped_sums_equal_a_naive_float64_loop[dpkeras]",
        ),
        "why": "with means of two rows clipped at C, one row moves the sum by 2·C",
    },
    {
        "name": "rows_clipped_in_pairs_at_sensitivity_c",
        "kind": "clipping",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "                rows_per_unit=self.plan.rows_clipped_together,\n",
        "new": "                rows_per_unit=2,\n",
        "tests": (
            _TESTS + "test_optimizers.py::"
            "test_clipped_sums_equal_a_naive_float64_loop[fast]",
        ),
        "why": "the same in the fast engine",
    },
    {
        "name": "users_rows_clipped_separately",
        "kind": "clipping",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "                rows_per_unit=self.plan.rows_clipped_together,\n",
        "new": "",
        "tests": (
            _TESTS + "test_optimizers.py::test_a_users_rows_are_clipped_together[fast]",
        ),
        "why": "a user of k rows moves the sum by k·C",
    },
    {
        "name": "users_rows_dealt_to_different_replicas",
        "kind": "clipping",
        "file": "tfdpsq/privacy/batches.py",
        "old": "microbatches = values.reshape(-1, microbatch_size, *",
        "new": "microbatches = values.reshape(-1, 1, *",
        "tests": (
            _TESTS + "test_trajectories.py::test_replicas_leave_a_users_rows_together",
        ),
        "why": "each replica clips its share of a user at C",
    },
    {
        "name": "missing_rows_of_a_user_counted",
        "kind": "weights",
        "file": _FAST + "engine.py",
        "old": "    if weights is not None:\n        use = factored.cleaned",
        "new": "    if weights is None:\n        use = factored.cleaned",
        "tests": (
            _TESTS + "test_fast_units.py::"
            "test_padding_rows_inside_a_unit_change_nothing",
        ),
        "why": "a user of few rows is clipped by those it does not own",
    },
    {
        "name": "options_of_the_parent_let_through",
        "kind": "clipping",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "    for name in _OWN_OPTIONS:\n",
        "new": "    for name in ():\n",
        "tests": (
            _TESTS + "test_optimizers.py::"
            "test_options_that_would_change_the_sensitivity_are_refused",
        ),
        "why": "num_microbatches=2 clips pairs of rows: one moves the sum by 2C",
    },
    {
        "name": "norms_of_the_first_weight_only",
        "kind": "clipping",
        "file": _FAST + "engine.py",
        "old": "gradient_norms.norm_and_bound([*squared.values()])",
        "new": "gradient_norms.norm_and_bound([*squared.values()][:1])",
        "tests": (
            _TESTS + "test_optimizers.py::"
            "test_clipped_sums_equal_a_naive_float64_loop[fast]",
        ),
        "why": "a gradient that is long in another weight is not clipped",
    },
    {
        "name": "one_dropout_for_units_taken_one_by_one",
        "kind": "keys",
        "file": "tfdpsq/privacy/step.py",
        "old": "    own = (places >= start) & (places < start + rows)",
        "new": "    own = places < rows",
        "tests": (
            _TESTS + "test_terms.py::"
            "test_units_taken_one_by_one_have_dropout_of_their_own[dpkeras]",
        ),
        "why": "whoever spoils a batch gives all others one mask, and their sum grows",
    },
    {
        "name": "undivided_loss_over_groups",
        "kind": "clipping",
        "file": "tfdpsq/privacy/training.py",
        "old": "    if microbatch_size is None:\n        raise",
        "new": "    if microbatch_size == 0:\n        raise",
        "tests": (_TESTS + "test_terms.py::test_groups_must_be_told_from_one_another",),
        "why": "a softmax over all groups would be noised for one of them",
    },
    {
        "name": "coupled_rows_at_sensitivity_c",
        "kind": "clipping",
        "file": "tfdpsq/privacy/coupled.py",
        "old": "    least = 2 * plan.max_batch_size - 1\n",
        "new": "    least = 1\n",
        "tests": (
            _TESTS + "test_coupled.py::"
            "test_what_is_not_covered_is_refused_before_anything_is_spent",
        ),
        "why": "one row can turn all others around, at noise for itself alone",
    },
    {
        "name": "coupled_rows_clipped_by_the_norm_as_computed",
        "kind": "precision",
        "file": "tfdpsq/privacy/coupled.py",
        "old": "        _, (bound,) = map(",
        "new": "        (bound,), _ = map(",
        "tests": (
            _TESTS + "test_coupled.py::"
            "test_no_row_is_longer_than_the_clip_norm_by_rounding",
        ),
        "why": "a norm rounded down leaves a row longer than the sensitivity says",
    },
    {
        "name": "coupled_rows_unclipped",
        "kind": "clipping",
        "file": "tfdpsq/privacy/coupled.py",
        "old": "tf.minimum(tf.constant(clip_norm, bound.dtype) / bound, 1.0)",
        "new": "tf.minimum(tf.constant(1e9, bound.dtype) / bound, 1.0)",
        "tests": (
            _TESTS + "test_coupled.py::test_any_gradients_stay_within_the_sensitivity",
        ),
        "why": "nothing would bound what a row adds",
    },
    {
        "name": "coupled_rows_dealt_to_every_replica",
        "kind": "clipping",
        "file": "tfdpsq/privacy/coupled.py",
        "old": "        return row + every, *(",
        "new": "        return row + 1, *(",
        "tests": (
            _TESTS + "test_coupled.py::test_two_replicas_take_the_step_of_one[2.0]",
        ),
        "why": "a row would count once for each replica, the noise only once",
    },
    {
        "name": "coupled_row_without_a_norm_added",
        "kind": "clipping",
        "file": "tfdpsq/privacy/coupled.py",
        "old": "        counts = tf.math.is_finite(bound) & (weights[row] > 0)\n",
        "new": "        counts = weights[row] > 0\n",
        "tests": (
            _TESTS + "test_coupled.py::"
            "test_a_row_without_a_finite_norm_adds_exactly_nothing[nan]",
        ),
        "why": "one row's NaN would spoil the sum, and show that it was drawn",
    },
    {
        "name": "batch_normalisation_run_where_none_of_its_weights_is_wanted",
        "kind": "clipping",
        "file": "tfdpsq/privacy/fast/capture.py",
        "old": "couples_examples(layer) or _has_wanted_weight(layer, recorder)",
        "new": "_has_wanted_weight(layer, recorder)",
        "tests": (
            "tests/privacy/test_fast_refusals.py::test_batch_normalisation_is_refused_in_training_only",
        ),
        "why": "a row's gradient reads the others through their mean: clipping bounds "
        "nothing",
    },
    {
        "name": "first_of_two_second_runs_forgotten",
        "kind": "ties",
        "file": "tfdpsq/privacy/fast/recorder.py",
        "old": "            self._finished.setdefault(key, []).extend(merged)\n",
        "new": "            self._finished[key] = merged\n",
        "tests": (
            "tests/privacy/test_fast.py::"
            "test_a_rematerialised_layer_that_runs_twice_has_the_cross_terms_of_both_runs",
        ),
        "why": "a rematerialised layer that runs twice is clipped by half of its "
        "gradient",
    },
    {
        "name": "dilation_left_out_of_patches",
        "kind": "clipping",
        "file": "tfdpsq/privacy/fast/keras_rules.py",
        "old": "rates=[*ones, *layer.dilation_rate, 1],",
        "new": (
            "rates=[1, 1, 1, 1]\n"
            '            if layer.padding == "same"\n'
            "            else [*ones, *layer.dilation_rate, 1],"
        ),
        "tests": (
            "tests/privacy/test_fast.py::"
            "test_each_weight_meets_the_inputs_that_its_layer_reads[same]",
        ),
        "why": "the kernel's gradient is made of inputs that it never met",
    },
    {
        "name": "scales_gradient_by_what_is_scaled_already",
        "kind": "clipping",
        "file": "tfdpsq/privacy/fast/keras_rules.py",
        "old": "sum_to(g * tf.cast(unit, g.dtype), shape)",
        "new": "sum_to(g * tf.cast(output, g.dtype), shape)",
        "tests": (
            "tests/privacy/test_fast_layers.py::"
            "test_in_float64_nothing_but_rounding_is_left",
        ),
        "why": "the norm of a scale's gradient is that of another function",
    },
    {
        "name": "permuted_equations_taken_for_products",
        "kind": "clipping",
        "file": "tfdpsq/privacy/fast/keras_rules.py",
        "old": "(into + out, along + into, along + out) == (weight, source, target)",
        "new": "(into + out, along + into) == (weight, source)",
        "tests": (
            "tests/privacy/test_fast.py::"
            "test_each_weight_meets_the_inputs_that_its_layer_reads[permuted]",
        ),
        "why": "square shapes fit, and rows are clipped by a norm that is not theirs",
    },
    {
        "name": "padding_of_coupled_rows_added",
        "kind": "clipping",
        "file": "tfdpsq/privacy/coupled.py",
        "old": "counts = tf.math.is_finite(bound) & (weights[row] > 0)",
        "new": "counts = tf.math.is_finite(bound)",
        "tests": (
            "tests/privacy/test_coupled.py::test_each_row_is_clipped_by_itself",
            "tests/privacy/test_coupled.py::test_two_replicas_take_the_step_of_one",
        ),
        "why": "how many rows are padding, so how many were drawn, moves the sum",
    },
    {
        "name": "each_variable_clipped_to_the_whole_norm",
        "kind": "clipping",
        "file": _FAST + "engine.py",
        "old": "            clip_norm * math.sqrt(sizes[key] / whole),\n",
        "new": "            clip_norm,\n",
        "tests": (_PER_LAYER + "test_a_unit_moves_the_sum_by_the_clip_norm_at_most",),
        "why": "a unit moves the sum by the root of the number of variables more",
    },
    {
        "name": "shares_of_the_clip_norm_add_up_without_squares",
        "kind": "clipping",
        "file": _FAST + "engine.py",
        "old": "math.sqrt(sizes[key] / whole)",
        "new": "(sizes[key] / whole) ** 0.25",
        "tests": (_PER_LAYER + "test_a_unit_moves_the_sum_by_the_clip_norm_at_most",),
        "why": "the norms of several variables add up to more than the clip norm",
    },
    {
        "name": "other_engines_clip_all_weights_where_each_was_asked",
        "kind": "certificate",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": 'if spec.private and spec.clip_per_layer and engine != "fast":',
        "new": 'if spec.private and spec.clip_per_layer and engine == "":',
        "tests": (
            _PER_LAYER + "test_engines_that_clip_all_weights_together_are_refused",
        ),
        "why": "the certificate says of each variable what holds for all together",
    },
)
