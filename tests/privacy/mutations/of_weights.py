"""Mistakes in what a row counts, is compared with, and trains."""

MUTATIONS = (
    {
        "name": "empty_place_inside_a_draw_counted",
        "kind": "weights",
        "file": "tfdpsq/privacy/batches.py",
        "old": "weights[: draw.count] = draw.weights[: draw.count]",
        "new": "weights[: draw.count] = 1",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_an_empty_place_inside_a_draw_counts_for_nobody",
        ),
        "why": (
            "a user with few rows gets row 0, another user's, clipped with its own"
        ),
    },
    {
        "name": "users_short_of_rows_filled_up_with_row_zero",
        "kind": "weights",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": """\
                weights[place, :taken] = 1
""",
        "new": """\
                weights[place] = 1
""",
        "tests": (
            "tests/privacy/test_sampling.py::"
            "test_draws_have_static_shapes_and_padding_of_weight_zero[shuffled user]",
        ),
        "why": ("row 0 takes part for others, many times over"),
    },
    {
        "name": "groups_filled_up_with_row_zero",
        "kind": "weights",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": """\
            weights[group, : len(own)] = 1
""",
        "new": """\
            weights[group] = 1
""",
        "tests": (
            "tests/privacy/test_sampling.py::"
            "test_draws_have_static_shapes_and_padding_of_weight_zero[dealt]",
        ),
        "why": ("row 0 is in every group that is not full, and moves all of them"),
    },
    {
        "name": "padding_weighted_by_logit_dp",
        "kind": "weights",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": "both = real[:, tf.newaxis] & real[tf.newaxis, :]",
        "new": "both = real[:, tf.newaxis] | real[tf.newaxis, :]",
        "tests": (
            "tests/retriever/test_direct_methods.py::"
            "test_the_logit_dp_sum_is_that_of_a_plain_loop",
        ),
        "why": ("scores of padding count, beyond the derived sensitivity"),
    },
    {
        "name": "coefficients_ignored",
        "kind": "coefficients",
        "file": "tfdpsq/privacy/terms.py",
        "old": ("        return _finite(found.coefficients)\n    return None if"),
        "new": ("        return tf.ones_like(found.coefficients)\n    return None if"),
        "tests": (
            "tests/privacy/test_terms.py::"
            "test_each_clipped_gradient_counts_by_its_coefficient",
        ),
        "why": (
            "n² clipped scores would count in full, and the bound is for "
            "weights that sum to 2 a row"
        ),
    },
    {
        "name": "coefficients_without_their_sign",
        "kind": "coefficients",
        "file": "tfdpsq/privacy/terms.py",
        "old": "return tf.where(tf.math.is_finite(constants), constants, 0.0)",
        "new": (
            "return tf.abs(tf.where(tf.math.is_finite(constants), constants, 0.0))"
        ),
        "tests": (
            "tests/privacy/test_terms.py::"
            "test_each_clipped_gradient_counts_by_its_coefficient",
        ),
        "why": ("another sum than the one whose sensitivity is derived"),
    },
    {
        "name": "coefficients_of_the_wrong_row",
        "kind": "coefficients",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": "coefficients = tf.where(both, tf.exp(logs) - tf.eye(rows), 0.0)",
        "new": (
            "coefficients = tf.where(\n"
            "            both, tf.transpose(tf.exp(logs)) - tf.eye(rows), 0.0\n"
            "        )"
        ),
        "tests": (
            "tests/retriever/test_direct_methods.py::"
            "test_the_logit_dp_sum_is_that_of_a_plain_loop",
        ),
        "why": ("a pair's column of shares is not bounded as its row is"),
    },
    {
        "name": "negatives_lost_on_resume",
        "kind": "negatives",
        "file": "tfdpsq/run/training/direct_training.py",
        "old": """\
        "state": loss.state,
""",
        "new": "",
        "tests": (
            "tests/run/test_direct_training.py::"
            "test_a_run_keeps_its_negatives_with_the_weights",
        ),
        "why": (
            "the steps that are repeated see other negatives: other steps, "
            "which nobody paid for"
        ),
    },
    {
        "name": "negatives_embedded_anew_on_resume",
        "kind": "negatives",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": "self.state = [self._embeddings, self._keys]",
        "new": "self.state = [self._keys]",
        "tests": (
            "tests/retriever/test_direct_losses.py::"
            "test_the_state_of_public_negatives_is_all_they_hold",
        ),
        "why": ("the same, for the embeddings alone"),
    },
    {
        "name": "negatives_left_out_for_other_rows_answers",
        "kind": "negatives",
        "file": "tfdpsq/retriever/losses.py",
        "old": (
            "dropped = (document_key[:, tf.newaxis] == keys) | "
            "_known(positive_keys, keys)"
        ),
        "new": (
            "known = tf.reduce_any(\n"
            "        _known(positive_keys, keys), axis=0, keepdims=True\n"
            "    )\n"
            "    dropped = (document_key[:, tf.newaxis] == keys) | known"
        ),
        "tests": (
            "tests/retriever/test_direct_losses.py::"
            "test_what_public_negatives_leave_out_depends_on_the_row_alone",
            "tests/retriever/test_hard_negatives.py::"
            "test_a_rows_own_negatives_are_no_others",
        ),
        "why": ("one pair's known answers change the losses of all others"),
    },
    {
        "name": "hard_negatives_without_other_queries_answers",
        "kind": "negatives",
        "file": "tfdpsq/run/training/hard_negatives.py",
        "old": "where answers.query = ranked.query\n",
        "new": "where true\n",
        "tests": (
            "tests/run/test_mine.py::"
            "test_the_rows_have_the_best_documents_that_are_no_answers",
        ),
        "why": ("a pair more changes what every other row is compared with"),
    },
    {
        "name": "missing_hard_negatives_filled_from_other_rows",
        "kind": "negatives",
        "file": "tfdpsq/retriever/training.py",
        "old": "at, none = np.maximum(chosen, 0), chosen < 0",
        "new": "at, none = np.maximum(chosen, 0), chosen < -1",
        "tests": (
            "tests/retriever/test_hard_negatives.py::"
            "test_negatives_are_as_many_as_there_are_up_to_the_count",
        ),
        "why": ("the text mined for one private query is in another's loss"),
    },
    {
        "name": "same_negatives_at_every_step",
        "kind": "negatives",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": "random = np.random.default_rng([self._seed, draw])",
        "new": "random = np.random.default_rng(self._seed)",
        "tests": (
            "tests/retriever/test_direct_losses.py::"
            "test_public_negatives_are_drawn_by_step_and_kept_between_refreshes",
        ),
        "why": ("what the certificate says of how negatives are drawn would not be so"),
    },
    {
        "name": "repeated_tokens_without_cross_terms",
        "kind": "ties",
        "file": "tfdpsq/privacy/fast/gradient_norms.py",
        "old": """\
                use.ids[:, :, tf.newaxis] == use.ids[:, tf.newaxis, :], dtype
""",
        "new": """\
                tf.eye(tf.shape(use.ids)[1], dtype=tf.bool)[tf.newaxis], dtype
""",
        "tests": (
            "tests/privacy/test_fast_layers.py::"
            "test_norms_of_each_weight_equal_a_naive_float64_loop[language]",
        ),
        "why": ("a token that a text has twice is one row of the embedding"),
    },
    {
        "name": "tied_logits_not_counted",
        "kind": "ties",
        "file": "tfdpsq/privacy/fast/keras_nlp_rules.py",
        "old": """\
    record.outer(weight, inputs, output, transposed=layer.tie_weights)
""",
        "new": """\
    if not layer.tie_weights:
        record.outer(weight, inputs, output)
""",
        "tests": (
            "tests/privacy/test_fast_layers.py::"
            "test_norms_of_each_weight_equal_a_naive_float64_loop[language]",
        ),
        "why": ("the embedding's largest gradient would be neither clipped nor used"),
    },
    {
        "name": "shared_weight_frozen_in_one_layer_only",
        "kind": "ties",
        "file": "tfdpsq/layers/trained_part.py",
        "old": """\
        for layer in owners[number]:
""",
        "new": """\
        for layer in owners[number][:1]:
""",
        "tests": (
            "tests/layers/test_trained_part.py::"
            "test_what_layers_share_has_its_first_path_and_is_frozen_everywhere",
        ),
        "why": ("a weight that is said to be frozen is trained by its other name"),
    },
    {
        "name": "everything_trained_beside_lora",
        "kind": "LoRA",
        "file": "tfdpsq/layers/lora.py",
        "old": """\
    model.trainable = True
    _freeze(model)
""",
        "new": """\
    model.trainable = True
""",
        "tests": (
            "tests/layers/test_lora.py::"
            "test_it_goes_where_the_targets_say_and_the_rest_is_frozen",
        ),
        "why": ("the certificate says that a low-rank update is all that was trained"),
    },
    {
        "name": "kernel_built_late_is_trained_beside_lora",
        "kind": "LoRA",
        "file": "tfdpsq/layers/lora.py",
        "old": """\
            self.dense.build(input_shape)
            _freeze_weights(self.dense)
""",
        "new": """\
            self.dense.build(input_shape)
""",
        "tests": (
            "tests/layers/test_lora.py::test_its_two_matrices_are_all_that_is_trained",
            "tests/layers/test_lora.py::test_it_computes_the_formula",
        ),
        "why": ("the same, for a layer without weights yet"),
    },
    {
        "name": "lora_released_with_another_scale",
        "kind": "LoRA",
        "file": "tfdpsq/layers/lora.py",
        "old": "return self.dense.kernel + (self.alpha / self.rank) * update",
        "new": "return self.dense.kernel + update",
        "tests": (
            "tests/layers/test_lora.py::test_what_merge_returns_computes_the_same",
        ),
        "why": ("other weights are released than were trained and measured"),
    },
    {
        "name": "options_checked_by_name_alone",
        "kind": "weights",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "    for name, value in options.items():\n        if value is None",
        "new": "    for name, value in options.items():\n"
        "        if name not in _SHARES + _ABOVE_0 or value is None",
        "tests": (
            "tests/privacy/test_optimizers.py::test_every_number_among_the_options_is_checked[adafactor-nan]",
        ),
        "why": "all steps are paid for and the weights are NaN",
    },
    {
        "name": "alias_of_the_rate_unchecked",
        "kind": "weights",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": '    if "lr" in options:',
        "new": '    if "lr" in ():',
        "tests": (
            "tests/privacy/test_optimizers.py::test_options_out_of_their_range_are_refused[adam-lr-0.1]",
        ),
        "why": "the rate that was checked is not the one that is applied",
    },
    {
        "name": "flags_taken_for_numbers_of_an_optimizer",
        "kind": "ledger",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "isinstance(value, bool) and name not in _SHARES + _ABOVE_0",
        "new": "isinstance(value, bool)",
        "tests": (
            "tests/privacy/test_optimizers.py::test_options_out_of_their_range_are_refused[adam-beta_1-True]",
        ),
        "why": "weights are NaN after the first step, and all of the plan is paid for",
    },
    {
        "name": "scores_beyond_the_last_part_counted",
        "kind": "coefficients",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": "return values, tf.where(counts, tf.gather_nd(found, at), 0.0), losses",
        "new": "return values, tf.gather_nd(found, at), losses",
        "tests": (
            "tests/retriever/test_direct_methods.py::"
            "test_the_logit_dp_sum_is_that_of_a_plain_loop",
        ),
        "why": "what fills up the last part is a pair's score again",
    },
    {
        "name": "last_part_of_terms_left_out",
        "kind": "coefficients",
        "file": "tfdpsq/privacy/terms.py",
        "old": "end = tf.reduce_max(tf.where(wanted, tf.range(parts) + 1, 0))",
        "new": "end = tf.reduce_max(tf.where(wanted, tf.range(parts), 0))",
        "tests": (
            "tests/retriever/test_direct_methods.py::"
            "test_the_logit_dp_sum_is_that_of_a_plain_loop",
        ),
        "why": "a row's shares do not add up to one, beyond the derived sensitivity",
    },
    {
        "name": "scores_clipped_under_other_dropout",
        "kind": "coefficients",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": "with dropout_seed(seeds[0], part, parts=0):",
        "new": "with dropout_seed(_seeds_of(self._draws)[0], part, parts=0):",
        "tests": (
            "tests/retriever/test_direct_losses.py::"
            "test_the_scores_that_are_clipped_are_those_that_were_counted",
        ),
        "why": "the gradient is not that of the forward pass that was counted",
    },
)
