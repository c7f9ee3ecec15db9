"""Mistakes in the noise and in what a logical step is."""

_TESTS = "tests/privacy/"
_STATISTICS = _TESTS + "test_statistics.py::"
_CORRELATION = _TESTS + "test_correlation.py::"
_WORKERS = (
    _TESTS + "test_workers.py::test_two_workers_train_what_one_would_and_pay_once"
)
_LAW = _STATISTICS + "test_zero_gradients_leave_the_stated_noise"

MUTATIONS = (
    {
        "name": "noise_per_replica",
        "kind": "noise",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": """\
            sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, sums)
""",
        "new": """\
            own = keys.noise + tf.cast(replica.replica_id_in_sync_group + 1, tf.int64)
            sums = self._noise_query.noised(sums, own, keys.number)
            sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, sums)
            return [value / self.plan.spec.batch_size for value in sums]
""",
        "tests": (_LAW + "[1-2]",),
        "why": "√replicas times the noise, as measured in tensorflow-privacy",
    },
    {
        "name": "replicas_draw_different_noise",
        "kind": "noise",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": """\
            sums = self._noise_query.noised(sums, keys.noise, keys.number, window)
""",
        "new": """\
            seed = keys.noise
            if replica is not None:
                seed += tf.cast(replica.replica_id_in_sync_group, tf.int64)
            sums = self._noise_query.noised(sums, seed, keys.number, window)
""",
        "tests": (_LAW + "[1-2]",),
        "why": "replicas drift apart, and each one's weights have noise of their own",
    },
    {
        "name": "noise_of_each_workers_own",
        "kind": "noise",
        "file": "tfdpsq/privacy/training.py",
        "old": "    optimizer.take_chiefs_seeds()\n",
        "new": "",
        "tests": (_WORKERS,),
        "why": "each worker's copy of the weights has a noise of its own",
    },
    {
        "name": "microbatches_numbered_by_replica",
        "kind": "keys",
        "file": "tfdpsq/privacy/step.py",
        "old": "number = first + tf.cast(index, tf.int64) * every",
        "new": "number = first * (rows // size) + tf.cast(index, tf.int64)",
        "tests": (
            _TESTS + "test_replicas.py::"
            "test_any_number_of_replicas_trains_the_same_weights[4.0]",
        ),
        "why": "a step repeated on other replicas has other masks: another step, "
        "which nobody paid for",
    },
    {
        "name": "noise_per_microstep",
        "kind": "noise",
        "file": "tfdpsq/privacy/step.py",
        "old": """\
            clipped = self.of_microbatch(part, number, keys)
""",
        "new": """\
            clipped = self.of_microbatch(part, number, keys)
            query = self.optimizer._noise_query
            new = query.noised(clipped.sums, keys.noise, 99 + number)
            clipped = clipped._replace(sums=new)
""",
        "tests": (_LAW + "[4-1]",),
        "why": "√k times the noise, as measured in tensorflow-privacy",
    },
    {
        "name": "noise_key_reused_across_variables",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "draw_key(own, step, position)",
        "new": "draw_key(own, step, 0)",
        "tests": (_LAW + "[1-1]",),
        "why": "the difference of two weights of one shape has no noise at all; in "
        "published code",
    },
    {
        "name": "noise_key_reused_across_steps",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "draw_key(own, step, position)",
        "new": "draw_key(own, 0, position)",
        "tests": (_LAW + "[1-1]",),
        "why": "the difference of two steps has no noise at all",
    },
    {
        "name": "noise_of_one_weight_used_again_for_the_next_ones_next_step",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "    upper = tf.bitwise.bitwise_xor(second, tf.cast(step, tf.int64))\n",
        "new": "    upper = second\n"
        "    lower += tf.cast(step, tf.int64) * (1 << _BLOCK_BITS)\n",
        "tests": (_LAW + "[1-1]",),
        "why": "each draw is used as often as there are weights",
    },
    {
        "name": "noise_of_another_law",
        "kind": "noise",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "    return tf.raw_ops.StatelessRandomNormalV2(\n"
        "        shape=shape, key=key.key, counter=key.counter, alg=PHILOX, "
        "dtype=dtype\n    )\n",
        "new": """\
    drawn = tf.raw_ops.StatelessRandomUniformV2(
        shape=shape, key=key.key, counter=key.counter, alg=PHILOX, dtype=dtype
    )
    return 12**0.5 * (drawn - 0.5)
""",
        "tests": (_STATISTICS + "test_the_noise_is_gaussian",),
        "why": "bounded noise of the right variance proves nothing",
    },
    {
        "name": "noise_draws_from_one_seed",
        "kind": "keys",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": 'derived_seed(noise_seed, f"noise {draw}")',
        "new": 'derived_seed(noise_seed, "noise")',
        "tests": (
            _STATISTICS + "test_the_dropout_seed_tells_nothing_of_the_noise_seed",
        ),
        "why": "one Philox key of 63 bits decides all noise",
    },
    {
        "name": "noise_key_of_32_bits",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "        tf.bitcast(first[tf.newaxis], tf.uint64),\n",
        "new": "        tf.cast(tf.cast(first[tf.newaxis], tf.uint32), tf.uint64),\n",
        "tests": (
            _STATISTICS + "test_every_bit_of_the_noise_seed_counts_compiled_or_not",
        ),
        "why": "as XLA made it: the noise of a year's run is guessed in a day",
    },
    {
        "name": "noise_of_a_seed_that_xla_shortens",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "draw_key(own, step, position), value.dtype)\n",
        "new": "DrawKey(*tf.raw_ops.StatelessRandomGetKeyCounter(\n"
        "                    seed=own ^ tf.stack([step, tf.constant(position, tf.int64)"
        "])\n                )), value.dtype)\n",
        "tests": (
            _STATISTICS
            + "test_every_bit_of_the_noise_seed_counts_compiled_or_not[True]",
        ),
        "why": "of 126 secret bits XLA keeps 64",
    },
    {
        "name": "halves_of_two_draws",
        "kind": "noise",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "        share = deviation / DRAWS**0.5\n",
        "new": "        share = deviation / DRAWS\n",
        "tests": (_LAW + "[1-1]",),
        "why": "√2 too little noise",
    },
    {
        "name": "noise_from_a_public_seed",
        "kind": "keys",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "fresh_seed(self.plan.spec.secure)",
        "new": "0",
        "tests": (
            _STATISTICS + "test_the_noise_follows_from_its_seed_and_nothing_else",
        ),
        "why": "whoever reads the source can subtract the noise",
    },
    {
        "name": "sensitivity_multiplier_ignored_in_the_noise",
        "kind": "noise",
        "file": "tfdpsq/privacy/plan.py",
        "old": "        return self.noise_multiplier * self.sensitivity\n",
        "new": "        return self.noise_multiplier * self.spec.clip_norm\n",
        "tests": (_STATISTICS + "test_a_larger_sensitivity_gets_as_much_more_noise",),
        "why": "an in-batch softmax moves the sum by (2n - 1)·C",
    },
    {
        "name": "divide_by_realised_batch",
        "kind": "noise",
        "file": "tfdpsq/privacy/step.py",
        "old": """\
        estimate = self.optimizer.privatize(sums, noise, keys)
""",
        "new": """\
        realised = self.optimizer.plan.spec.batch_size / tf.maximum(count, 1)
        estimate = self.optimizer.privatize(sums, noise, keys)
        estimate = [value * tf.cast(realised, value.dtype) for value in estimate]
""",
        "tests": (
            _TESTS + "test_optimizers.py::test_the_update_is_normalised_by_the_"
            "expected_batch_not_the_drawn_one[fast]",
        ),
        "why": "the size of a batch is private, and the noise's scale would show it",
    },
    {
        "name": "skip_empty_batches",
        "kind": "noise",
        "file": "tfdpsq/privacy/loop.py",
        "old": """\
        draws = [self.sampler.draw(number) for number in now]
""",
        "new": """\
        draws = [self.sampler.draw(number) for number in now]
        if not draws[0].count:
            self.unchanging._optimizer.iterations.assign_add(1)
            return [0.0]
""",
        "tests": (
            _STATISTICS + "test_steps_without_anybody_are_noisy_like_all_others",
        ),
        "why": "a step without noise says that nobody was drawn",
    },
    {
        "name": "empty_batches_without_noise",
        "kind": "noise",
        "file": "tfdpsq/privacy/step.py",
        "old": """\
        estimate = self.optimizer.privatize(sums, noise, keys)
""",
        "new": """\
        estimate = self.optimizer.privatize(sums, noise, keys)
        some = tf.minimum(count, 1)
        estimate = [value * tf.cast(some, value.dtype) for value in estimate]
""",
        "tests": (
            _TESTS + "test_optimizers.py::test_an_empty_batch_still_takes_a_noisy_step",
        ),
        "why": "the same, in a loop of one's own",
    },
    {
        "name": "iterations_counted_per_microstep",
        "kind": "noise",
        "file": "tfdpsq/privacy/step.py",
        "old": "            part = _slice(batch, index * size, size)\n",
        "new": """\
            part = _slice(batch, index * size, size)
            if hasattr(self.optimizer, "_hyper"):
                self.optimizer.iterations.assign_add(tf.cast(index > 0, tf.int64))
""",
        "tests": (
            _TESTS + "test_trajectories.py::test_a_trajectory_follows_its_paper_"
            "once_per_logical_step[adam-schedule]",
        ),
        "why": "schedules and Adam's bias correction run k times too fast, and noise "
        "keys are skipped",
    },
    {
        "name": "clipping_without_privacy",
        "kind": "clipping",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "    if not spec.private:\n",
        "new": "    if False:\n",
        "tests": (
            _TESTS + "test_optimizers.py::"
            "test_without_privacy_the_step_is_the_plain_gradients",
        ),
        "why": "the baseline would be handicapped, and every private run look better",
    },
    {
        "name": "seed_stored_in_the_optimizers_config",
        "kind": "release",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "    def prepare(self, variables",
        "new": """\
    def get_config(self):
        return {**super().get_config(), "noise": self._noise_words}

    def prepare(self, variables""",
        "tests": (
            _TESTS + "test_optimizers.py::test_the_seed_is_in_nothing_that_is_saved",
        ),
        "why": "Keras saves it with the model, and the model is released",
    },
    {
        "name": "noise_keyed_by_a_counter_that_callbacks_set",
        "kind": "keys",
        "file": "tfdpsq/privacy/step.py",
        "old": "keys = keys or self.optimizer.step_keys(self.optimizer.iterations)",
        "new": """\
own = self.optimizer.step_keys(self.optimizer.iterations)
        keys = own if keys is None else keys._replace(number=own.number)""",
        "tests": (_STATISTICS + "test_noise_is_of_the_loops_step_and_of_one_run",),
        "why": "a callback that loads the best weights repeats the noise of its steps",
    },
    {
        "name": "seeds_of_one_optimizer_for_all_its_runs",
        "kind": "keys",
        "file": "tfdpsq/privacy/training.py",
        "old": "    optimizer.reseed_for_a_run()\n",
        "new": "",
        "tests": (_STATISTICS + "test_noise_is_of_the_loops_step_and_of_one_run",),
        "why": "a copy of an optimizer, or one set back, has the noise of another run",
    },
    {
        "name": "noise_seeds_are_constants_of_the_graph",
        "kind": "release",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "self._noise_query.noised(sums, keys.noise, keys.number, window)",
        "new": """self._noise_query.noised(
                sums, tf.constant(self._noise_words, tf.int64), keys.number, window
            )""",
        "tests": (_STATISTICS + "test_no_seed_is_in_a_dump_of_the_graph[False]",),
        "why": "who is given TensorBoard's files subtracts the noise",
    },
    {
        "name": "dropout_seeds_are_constants_of_the_graph",
        "kind": "release",
        "file": "tfdpsq/privacy/step.py",
        "old": "replayable(self.layers, keys.dropout,",
        "new": "replayable(self.layers, optimizer.dropout_seed,",
        "tests": (_STATISTICS + "test_no_seed_is_in_a_dump_of_the_graph[True]",),
        "why": "who is given TensorBoard's files knows the masks",
    },
    {
        "name": "weights_that_no_row_touches_left_without_noise",
        "kind": "noise",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": (
            "            noised.append(value + tf.cast(share, "
            "value.dtype) * tf.add_n(draws))"
        ),
        "new": (
            "            drawn = tf.cast(share, value.dtype) * tf.add_n(draws)\n"
            "            noised.append(tf.where(value != 0, value + drawn, value))"
        ),
        "tests": (
            "tests/privacy/test_statistics.py::"
            "test_zero_gradients_leave_the_stated_noise",
        ),
        "why": "weights that did not move tell which words nobody wrote",
    },
    {
        "name": "noise_of_float32_on_sums_of_float64",
        "kind": "noise",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "normal(tf.shape(value), draw_key(own, step, position), value.dtype)",
        "new": (
            "tf.cast(normal(tf.shape(value), draw_key(own, step, "
            "position), tf.float32), value.dtype)"
        ),
        "tests": (
            "tests/privacy/test_statistics.py::"
            "test_noise_of_float64_sums_has_all_their_digits",
        ),
        "why": "the last digits of a sum have no noise at all",
    },
    {
        "name": "noise_of_every_sixteenth_variable_alike",
        "kind": "noise",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "draw_key(own, step, position), value.dtype)",
        "new": "draw_key(own, step, position % 16), value.dtype)",
        "tests": (
            "tests/privacy/test_statistics.py::test_no_two_of_many_variables_share_their_noise",
        ),
        "why": "the difference of two weights has no noise, where they have one shape",
    },
    {
        "name": "shares_of_a_matrix_that_is_not_scaled",
        "kind": "noise",
        "file": "tfdpsq/privacy/randomness/correlation.py",
        "old": "_series(self.steps, 0.5) * np.linalg.norm(_series(self.steps, -0.5))",
        "new": "_series(self.steps, 0.5)",
        "tests": (_CORRELATION + "test_no_unit_is_seen_better_than_epsilon_says",),
        "why": "a unit moves the sums of a window by more than the sensitivity",
    },
    {
        "name": "windows_that_reach_over_epochs",
        "kind": "noise",
        "file": "tfdpsq/privacy/randomness/correlation.py",
        "old": "return step % self.steps_per_epoch % self.steps",
        "new": "return step % self.steps",
        "tests": (_CORRELATION + "test_no_unit_is_seen_better_than_epsilon_says",),
        "why": "a unit is in two steps of a window, which its matrix adds up",
    },
    {
        "name": "windows_longer_than_an_epoch",
        "kind": "noise",
        "file": "tfdpsq/privacy/plan.py",
        "old": "        epoch = self.spec.num_units // self.spec.batch_size\n",
        "new": "        epoch = self.spec.steps\n",
        "tests": (_CORRELATION + "test_no_unit_is_seen_better_than_epsilon_says",),
        "why": "a unit is in two steps of a window, which its matrix adds up",
    },
    {
        "name": "one_draw_for_all_steps_of_a_window",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "self._with_draws(values, seed, step - past, shares[past])",
        "new": "self._with_draws(values, seed, step - before, shares[past])",
        "tests": (_CORRELATION + "test_the_matrix_times_the_noise_is_white",),
        "why": "differences of two steps of a window have no noise",
    },
    {
        "name": "the_last_share_of_a_window_forgotten",
        "kind": "noise",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "lambda past, *_: past <= before,",
        "new": "lambda past, *_: (past < before) | (past == 0),",
        "tests": (_CORRELATION + "test_the_matrix_times_the_noise_is_white",),
        "why": "the noise is that of another matrix, whose columns are longer",
    },
    {
        "name": "noise_cancels_over_poisson_batches",
        "kind": "noise",
        "file": "tfdpsq/privacy/spec.py",
        "old": """        if self.sampler != "shuffled":
            yield (
                f"noise_window is""",
        "new": """        if self.sampler is None:
            yield (
                f"noise_window is""",
        "tests": (_CORRELATION + "test_what_it_is_not_derived_for_is_refused",),
        "why": "a unit may be in every step of a window",
    },
    {
        "name": "noise_on_a_grid_cancels",
        "kind": "secure",
        "file": "tfdpsq/privacy/spec.py",
        "old": """        if self.secure:
            yield (
                f"noise_window is""",
        "new": """        if self.secure is None:
            yield (
                f"noise_window is""",
        "tests": (_CORRELATION + "test_what_it_is_not_derived_for_is_refused",),
        "why": "the noise of a secure plan is added as drawn: nothing would cancel, "
        "and its certificate would say that it does",
    },
    {
        "name": "rehearsal_takes_draws_of_the_run",
        "kind": "keys",
        "file": "tfdpsq/privacy/plan.py",
        "old": "        return epoch * (touched + 1) - 1\n",
        "new": "        return self.spec.steps\n",
        "tests": (
            _CORRELATION
            + "test_the_step_that_is_tried_has_no_draw_of_one_that_is_taken",
        ),
        "why": "the noise of steps to come is in memory before they are paid for",
    },
)
