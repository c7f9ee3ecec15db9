"""Mistakes in training the retriever directly: bounds that are too small."""

_TESTS = "tests/retriever/test_direct_methods.py::"
_SEARCH = _TESTS + "test_no_neighbour_moves_the_sum_beyond_the_stated_sensitivity"
_BOUNDS = "tfdpsq/retriever/direct_dp.py"
_ADAPTER = "tfdpsq/layers/query_adapter.py"
_ADAPTED = "tests/layers/test_query_adapter.py::"

MUTATIONS = (
    {
        "name": "naive_at_one_clip_norm_a_row",
        "kind": "clipping",
        "file": _BOUNDS,
        "old": 'return 2 * positive_integer("max_batch_size", max_batch_size) - 1',
        "new": 'return positive_integer("max_batch_size", max_batch_size)',
        "tests": (
            "tests/retriever/test_direct_dp.py::"
            "test_one_pair_moves_almost_every_row_but_never_beyond_the_bound[64]",
        ),
        "why": "rows that one pair turns around move by two clip norms each",
    },
    {
        "name": "groups_at_sensitivity_c",
        "kind": "clipping",
        "file": _BOUNDS,
        "old": "    return 2\n",
        "new": "    return 1\n",
        "tests": (_SEARCH + "[microbatch-20.0-0.8-8]",),
        "why": "a pair can turn its group's gradient around",
    },
    {
        "name": "rows_read_their_querys_other_pairs",
        "kind": "clipping",
        "file": "tfdpsq/run/training/direct_training.py",
        "old": '    arrays["positive_keys"] = np.full([len(pairs), 1], -1, np.int64)\n',
        "new": (
            "    arrays.update(\n"
            "        retriever.encode_pairs(\n"
            "            pairs,\n"
            "            tokenizer,\n"
            "            query_length=query_length,\n"
            "            document_length=document_length,\n"
            "        )\n"
            "    )\n"
        ),
        "tests": (
            "tests/run/test_pair_unit.py::"
            "test_no_row_of_direct_training_reads_another_pair",
        ),
        "why": "under unit pair, a pair would move the rows of its query's other pairs",
    },
    {
        "name": "pooled_queries_of_other_rows",
        "kind": "clipping",
        "file": "tfdpsq/retriever/stored_pairs.py",
        "old": "return {**found, **self._states.take(indices)}",
        "new": "return {**found, **self._states.take(np.sort(indices))}",
        "tests": (
            "tests/retriever/test_stored_pairs.py::"
            "test_pooled_queries_are_those_of_the_tower",
        ),
        "why": "a row would be made of two pairs, and each pair move two rows",
    },
    {
        "name": "groups_planned_at_sensitivity_c",
        "kind": "clipping",
        "file": "tfdpsq/privacy/spec.py",
        "old": "        if self.sensitivity_multiplier < 2:\n",
        "new": "        if self.sensitivity_multiplier < 1:\n",
        "tests": (
            "tests/privacy/test_spec.py::"
            "test_two_values_that_clash_are_both_named_with_a_way_out",
        ),
        "why": "noise would be made for half of what a pair can move",
    },
    {
        "name": "temperature_left_out_of_logit_dp",
        "kind": "coefficients",
        "file": _BOUNDS,
        "old": '    spread = math.exp(-2.0 * positive("scale", scale))\n',
        "new": '    spread = math.exp(-2.0) if positive("scale", scale) else 0.0\n',
        "tests": (_TESTS + "test_logit_dps_bound_by_hand_and_where_it_is_vacuous",),
        "why": "in published code; at a scale of 5 noise is a hundredth of what it "
        "must be",
    },
    {
        "name": "hard_negatives_shared_by_rows",
        "kind": "negatives",
        "file": "tfdpsq/retriever/losses.py",
        "old": """\
        cosines.append(tf.einsum("id,ihd->ih", query_embeddings, own_negatives))
""",
        "new": """\
        everyones = tf.reduce_mean(own_negatives, axis=0)
        cosines.append(tf.einsum("id,hd->ih", query_embeddings, everyones))
""",
        "tests": (
            _SEARCH + "[own_negatives-20.0-0.8-8]",
            "tests/retriever/test_hard_negatives.py::"
            "test_a_rows_own_negatives_are_no_others",
        ),
        "why": "what is mined for one private query would reach every row's gradient",
    },
    {
        "name": "negatives_from_the_batch",
        "kind": "negatives",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": "            self._embeddings,\n            self._keys,\n",
        "new": """\
            model.encode_documents(batch["document_ids"], batch["document_lengths"]),
            batch["document_key"],
""",
        "tests": (
            _SEARCH + "[public_negatives-20.0-0.8-8]",
            "tests/retriever/test_direct_losses.py::"
            "test_what_public_negatives_leave_out_depends_on_the_row_alone",
        ),
        "why": "every row's gradient would depend on who else was drawn",
    },
    {
        "name": "draw_cut_into_groups",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "        dealt = random.integers(self.groups, size=drawn.count)\n",
        "new": "        dealt = np.arange(drawn.count) % self.groups\n",
        "tests": (
            "tests/privacy/test_statistics_sampling.py::"
            "test_units_are_dealt_independently_and_uniformly",
        ),
        "why": "a pair more would shift all pairs after it into other groups",
    },
    {
        "name": "logit_dp_at_the_expected_batch",
        "kind": "clipping",
        "file": "tfdpsq/run/training/direct_training.py",
        "old": "retriever.logit_dp_sensitivity_multiplier(maximum, config.scale)",
        "new": (
            "retriever.logit_dp_sensitivity_multiplier(\n"
            "            config.batch_size, config.scale\n"
            "        )"
        ),
        "tests": (
            "tests/run/test_direct_training.py::"
            "test_each_method_trains_and_certifies_the_sensitivity_it_derives",
        ),
        "why": "the bound must cover the largest batch that can be drawn",
    },
    {
        "name": "adapted_queries_have_the_length_of_the_batch",
        "kind": "clipping",
        "file": _ADAPTER,
        "old": "    return tf.math.l2_normalize(vectors, axis=-1)\n",
        "new": "    return tf.math.l2_normalize(vectors, axis=[0, -1])\n",
        "tests": (
            _ADAPTED + "test_one_pair_moves_the_clipped_sum_by_the_clip_norm_at_most",
        ),
        "why": "a row's gradient would shrink with the rows beside it",
    },
    {
        "name": "a_softmax_leaves_out_what_answers_another_query",
        "kind": "negatives",
        "file": _ADAPTER,
        "old": "        again = _with(documents[:, 0], documents, others) > _SAME\n",
        "new": (
            "        again = _with(documents[:, 0], documents, others) > _SAME\n"
            "        again = again | tf.reduce_any(again, axis=0, keepdims=True)\n"
        ),
        "tests": (
            _ADAPTED + "test_the_loss_is_a_softmax_among_the_negatives_that_are_other"
            "_documents",
        ),
        "why": "a pair would take its document out of all other rows' softmax",
    },
    {
        "name": "negatives_that_a_resumed_run_may_change",
        "kind": "resumes",
        "file": _ADAPTER,
        "old": "    others = tf.constant(_checked(negatives))\n",
        "new": "    others = tf.Variable(_checked(negatives), trainable=False)\n",
        "tests": (
            _ADAPTED + "test_a_run_goes_on_with_the_negatives_that_it_began_with",
        ),
        "why": "the same noise over other negatives is a second look",
    },
)
