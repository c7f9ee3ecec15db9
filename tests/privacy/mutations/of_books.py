"""Mistakes in what is counted, paid for, drawn and kept while a run lasts."""

MUTATIONS = (
    {
        "name": "spec_takes_groups_at_one_clip_norm",
        "kind": "clipping",
        "file": "tfdpsq/privacy/spec.py",
        "old": "if self.sensitivity_multiplier < 2:",
        "new": "if self.sensitivity_multiplier < 1:",
        "tests": (
            "tests/privacy/test_spec.py::"
            "test_two_values_that_clash_are_both_named_with_a_way_out",
        ),
        "why": (
            "one unit turns its group's gradient around, at noise for half of that"
        ),
    },
    {
        "name": "more_units_than_the_bound_accepted",
        "kind": "sampling",
        "file": "tfdpsq/privacy/plan.py",
        "old": "if units > spec.num_units or (",
        "new": "if (",
        "tests": (
            "tests/privacy/test_plan.py::"
            "test_data_that_do_not_fit_the_plan_are_refused",
        ),
        "why": "truncation is priced for fewer units than are drawn",
    },
    {
        "name": "secure_left_out_of_the_plans_fingerprint",
        "kind": "ledger",
        "file": "tfdpsq/privacy/spec.py",
        "old": "if not fields[field]:",
        "new": 'if field == "secure" or not fields[field]:',
        "tests": (
            "tests/privacy/test_plan.py::"
            "test_the_fingerprint_is_of_all_that_decides_what_runs",
        ),
        "why": "a ledger of a default run passes for one of a secure run",
    },
    {
        "name": "epoch_begun_not_counted",
        "kind": "composition",
        "file": "tfdpsq/privacy/accounting.py",
        "old": "return -(-steps // (n // batch_size))",
        "new": "return max(1, steps // (n // batch_size))",
        "tests": ("tests/privacy/test_accounting.py::test_epochs_touched",),
        "why": "a unit drawn in the last epoch is shown once more than is counted",
    },
    {
        "name": "one_noise_for_all_candidates",
        "kind": "keys",
        "file": "tfdpsq/privacy/proof/choice.py",
        "old": (
            "noisy = [epsilon * value / SENSITIVITY + _gumbel() for value in sums]"
        ),
        "new": (
            "shared = _gumbel()\n"
            "    noisy = [epsilon * value / SENSITIVITY + shared for value in "
            "sums]"
        ),
        "tests": (
            "tests/privacy/test_choice.py::"
            "test_draws_follow_the_probabilities_and_no_other_scale",
        ),
        "why": "the highest score wins, without any privacy",
    },
    {
        "name": "choice_noise_of_24_bits",
        "kind": "keys",
        "file": "tfdpsq/privacy/proof/choice.py",
        "old": "_BITS = 256",
        "new": "_BITS = 24",
        "tests": (
            "tests/privacy/test_choice.py::"
            "test_gumbel_noise_has_its_distribution_and_its_far_tail",
        ),
        "why": "what is unlikely never happens, which no epsilon allows",
    },
    {
        "name": "choice_draws_from_pythons_generator",
        "kind": "keys",
        "file": "tfdpsq/privacy/proof/choice.py",
        "old": "secrets.randbits(_BITS)",
        "new": "__import__('random').Random(0).getrandbits(_BITS)",
        "tests": (
            "tests/privacy/test_choice.py::"
            "test_draws_follow_the_probabilities_and_no_other_scale",
        ),
        "why": "the noise of the choice is known to all",
    },
    {
        "name": "second_place_of_a_read_left_out",
        "kind": "reads",
        "file": "tfdpsq/privacy/proof/reads.py",
        "old": "if entry is not None and entry not in entries:",
        "new": (
            'if entry is not None and entry["what"] not in [e["what"] for e in '
            "entries]:"
        ),
        "tests": (
            "tests/privacy/test_reads.py::"
            "test_entries_are_kept_in_order_each_once_and_warned_of",
        ),
        "why": "what was read goes to a place that the certificate does not name",
    },
    {
        "name": "reads_of_an_earlier_process_forgotten",
        "kind": "reads",
        "file": "tfdpsq/privacy/proof/reads.py",
        "old": "            self._entries = _share(self.path, None)",
        "new": "            _share(self.path, None)",
        "tests": (
            "tests/privacy/test_reads.py::test_a_restarted_stage_goes_on_with_the_list",
        ),
        "why": "a restarted stage certifies that nothing was read before",
    },
    {
        "name": "reads_of_another_process_forgotten",
        "kind": "reads",
        "file": "tfdpsq/privacy/proof/reads.py",
        "old": "            self._entries = _share(self.path, entry)",
        "new": (
            "            _share(self.path, entry)\n"
            "            self._entries.append(entry)"
        ),
        "tests": (
            "tests/privacy/test_reads.py::"
            "test_entries_are_kept_in_order_each_once_and_warned_of",
        ),
        "why": "the certificate lists the reads of one process alone",
    },
    {
        "name": "ledger_appended_to_when_changed",
        "kind": "ledger",
        "file": "tfdpsq/privacy/proof/append_only.py",
        "old": "            self._check_untouched(descriptor)\n",
        "new": "",
        "tests": (
            "tests/privacy/test_ledger.py::"
            "test_a_ledger_deleted_or_changed_while_in_use_stops_the_run",
        ),
        "why": "steps are paid for in a file that is gone",
    },
    {
        "name": "half_a_line_left_by_a_full_disk",
        "kind": "ledger",
        "file": "tfdpsq/privacy/proof/append_only.py",
        "old": "                    os.ftruncate(descriptor, self._size)",
        "new": "                    pass",
        "tests": (
            "tests/privacy/test_append_only.py::"
            "test_a_disk_full_at_any_byte_pays_nothing_and_loses_nothing",
        ),
        "why": "the next line goes on in a torn one, and the ledger is lost",
    },
    {
        "name": "replay_relies_on_memory",
        "kind": "ledger",
        "file": "tfdpsq/privacy/proof/append_only.py",
        "old": ("                    os.fsync(descriptor)\n                except"),
        "new": "                except",
        "tests": (
            "tests/privacy/test_append_only.py::"
            "test_a_replay_relies_on_the_device_alone",
        ),
        "why": "a step is taken for paid whose line a power cut takes away",
    },
    {
        "name": "ledger_open_twice",
        "kind": "ledger",
        "file": "tfdpsq/privacy/proof/append_only.py",
        "old": (
            "fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))"
        ),
        "new": "fcntl.flock(descriptor, fcntl.LOCK_SH)",
        "tests": ("tests/privacy/test_ledger.py::test_two_never_share_a_ledger",),
        "why": "two processes take steps that are paid for once",
    },
    {
        "name": "infinite_weights_taken_for_finite",
        "kind": "ledger",
        "file": "tfdpsq/privacy/endings.py",
        "old": "tf.reduce_all(tf.math.is_finite(v))",
        "new": "tf.reduce_all(~tf.math.is_nan(v))",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_a_value_that_is_not_finite_is_seen_wherever_it_is",
        ),
        "why": "a diverged run goes on, and its last finite weights are lost",
    },
    {
        "name": "first_weight_alone_looked_at_for_divergence",
        "kind": "ledger",
        "file": "tfdpsq/privacy/endings.py",
        "old": "for v in variables]",
        "new": "for v in variables[:1]]",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_a_value_that_is_not_finite_is_seen_wherever_it_is",
        ),
        "why": "a diverged run goes on, and its last finite weights are lost",
    },
    {
        "name": "loop_goes_on_to_its_full_length",
        "kind": "ledger",
        "file": "tfdpsq/privacy/compiled.py",
        "old": "lambda index, _: index < used,",
        "new": "lambda index, _: index < self._most,",
        "tests": (
            "tests/privacy/test_replicas.py::"
            "test_loops_of_steps_are_the_steps_one_by_one",
        ),
        "why": "the last loop takes steps that nobody paid for",
    },
    {
        "name": "one_secure_noise_for_a_whole_loop",
        "kind": "noise",
        "file": "tfdpsq/privacy/compiled.py",
        "old": "own = [tf.gather(values, index) for values in noise]",
        "new": "own = [values[0] for values in noise]",
        "tests": (
            "tests/privacy/test_replicas.py::"
            "test_loops_of_steps_are_the_steps_one_by_one",
        ),
        "why": "differences of successive weights show sums without noise",
    },
    {
        "name": "one_batch_for_a_whole_loop",
        "kind": "sampling",
        "file": "tfdpsq/privacy/compiled.py",
        "old": (
            "batch = {name: tf.gather(values, index) for name, values in "
            "batches.items()}"
        ),
        "new": "batch = {name: values[0] for name, values in batches.items()}",
        "tests": (
            "tests/privacy/test_replicas.py::"
            "test_loops_of_steps_are_the_steps_one_by_one",
        ),
        "why": "units are in more steps than they were drawn for",
    },
    {
        "name": "owners_of_rows_left_out_of_the_fingerprint",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": "for values in (groups.rows, groups.offsets):",
        "new": "for values in ():",
        "tests": (
            "tests/privacy/test_before_spending.py::test_other_users_are_other_data",
        ),
        "why": "a run goes on with other units than those it paid for",
    },
    {
        "name": "own_random_numbers_unseeded",
        "kind": "keys",
        "file": "tfdpsq/privacy/training.py",
        "old": "        tf.random.set_seed(_global_seed(plan, seed))",
        "new": "        pass",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_draws_that_no_trace_shows_are_seeded_in_secret",
        ),
        "why": (
            "masks follow from a seed that may be public, and tell of who else "
            "was drawn"
        ),
    },
    {
        "name": "own_random_numbers_from_a_constant",
        "kind": "keys",
        "file": "tfdpsq/privacy/training.py",
        "old": 'return derived_seed(seed, "global") % (1 << 63)',
        "new": "return 7",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_draws_that_no_trace_shows_are_seeded_in_secret",
        ),
        "why": "masks are known to all, and tell of who else was drawn",
    },
    {
        "name": "infinite_coefficients_let_through",
        "kind": "coefficients",
        "file": "tfdpsq/privacy/terms.py",
        "old": "return tf.where(tf.math.is_finite(constants), constants, 0.0)",
        "new": "return constants",
        "tests": (
            "tests/privacy/test_terms.py::"
            "test_a_term_that_is_no_number_contributes_nothing",
        ),
        "why": "one row's coefficient takes the whole sum",
    },
    {
        "name": "interrupted_fit_counts_nothing",
        "kind": "ledger",
        "file": "tfdpsq/privacy/model.py",
        "old": "self.steps_executed = max(self.steps_executed, ran)",
        "new": "pass",
        "tests": (
            "tests/privacy/test_model.py::"
            "test_an_interrupted_fit_counts_the_steps_that_ran",
        ),
        "why": "epsilon of a model that was trained is said to be 0",
    },
    {
        "name": "diverged_fit_counts_the_steps_it_took",
        "kind": "ledger",
        "file": "tfdpsq/privacy/model.py",
        "old": "        ran = epoch.executed if paid is None else paid\n",
        "new": "        ran = epoch.executed\n",
        "tests": (
            "tests/privacy/test_model.py::"
            "test_a_fit_that_diverges_has_spent_the_whole_plan",
        ),
        "why": "noised weights decided the end, which fewer steps do not cover",
    },
    {
        "name": "paid_before_an_interrupted_fit_forgotten",
        "kind": "ledger",
        "file": "tfdpsq/privacy/model.py",
        "old": "paid = ledger.steps_paid if ledger else None",
        "new": "paid = None",
        "tests": (
            "tests/privacy/test_model.py::"
            "test_a_fit_that_goes_on_counts_what_was_paid_before_it",
        ),
        "why": "weights that callbacks saw before a kill are not counted",
    },
    {
        "name": "scores_beyond_one_counted_twice",
        "kind": "coefficients",
        "file": "tfdpsq/privacy/proof/choice.py",
        "old": "bounded = min(max(float(score), 0.0), 1.0)",
        "new": "bounded = min(max(float(score), 0.0), 2.0)",
        "tests": (
            "tests/privacy/test_choice.py::test_no_score_moves_a_sum_by_more_than_1",
        ),
        "why": "one query moves a sum by twice the sensitivity",
    },
    {
        "name": "step_that_cannot_be_repeated_accepted",
        "kind": "resumes",
        "file": "tfdpsq/privacy/trials.py",
        "old": "    replay.require_repeatable(traced.nodes)\n",
        "new": "",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_random_numbers_that_cannot_be_repeated_are_refused",
        ),
        "why": "of a step taken twice two different sums have one noise",
    },
    {
        "name": "draws_from_a_seed_in_the_graph_accepted_without_a_directory",
        "kind": "keys",
        "file": "tfdpsq/privacy/trials.py",
        "old": "    replay.require_repeatable(traced.nodes)\n",
        "new": "    if repeats:\n        replay.require_repeatable(traced.nodes)\n",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_draws_whose_seed_is_in_the_graph_are_refused",
        ),
        "why": "31 bits of secret are no secret, and stand in a graph that is saved",
    },
    {
        "name": "random_numbers_inside_loops_not_looked_for",
        "kind": "resumes",
        "file": "tfdpsq/privacy/replay.py",
        "old": "*(n for f in made.library.function for n in f.node_def)]",
        "new": "]",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_every_way_to_draw_from_a_state_is_known",
        ),
        "why": "a model that draws in a loop is another one when a step is repeated",
    },
    {
        "name": "generators_with_a_state_not_looked_for",
        "kind": "resumes",
        "file": "tfdpsq/privacy/replay.py",
        "old": "Rng(ReadAndSkip|Skip)|",
        "new": "",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_every_way_to_draw_from_a_state_is_known",
        ),
        "why": "a tf.random.Generator goes on where a killed run left it",
    },
    {
        "name": "secure_noise_the_same_in_every_step",
        "kind": "secure",
        "file": "tfdpsq/privacy/compiled.py",
        "old": "return self._optimizer.secure_noise(number, self.variables)",
        "new": "return self._optimizer.secure_noise(0, self.variables)",
        "tests": (
            "tests/privacy/test_secure.py::"
            "test_each_step_of_a_run_has_secure_noise_of_its_own",
        ),
        "why": "the difference of two steps has no noise",
    },
    {
        "name": "secure_noise_of_a_loops_first_step",
        "kind": "secure",
        "file": "tfdpsq/privacy/loop.py",
        "old": "noise = [self.take_steps.secure_noise(number) for number in now]",
        "new": "noise = [self.take_steps.secure_noise(now.start) for _ in now]",
        "tests": (
            "tests/privacy/test_secure.py::"
            "test_each_step_of_a_run_has_secure_noise_of_its_own",
        ),
        "why": "all steps of one compiled call have one noise",
    },
    {
        "name": "rows_after_a_row_not_tried",
        "kind": "clipping",
        "file": "tfdpsq/privacy/independence.py",
        "old": "for row in sorted({0, rows - 1}):",
        "new": "for row in (rows - 1,):",
        "tests": (
            "tests/privacy/test_independence.py::"
            "test_rows_that_read_the_others_on_one_side_are_found",
        ),
        "why": "a first row that reads those after it is clipped as if it did not",
    },
    {
        "name": "rows_before_a_row_not_tried",
        "kind": "clipping",
        "file": "tfdpsq/privacy/independence.py",
        "old": "for row in sorted({0, rows - 1}):",
        "new": "for row in (0,):",
        "tests": (
            "tests/privacy/test_independence.py::"
            "test_rows_that_read_the_others_on_one_side_are_found",
        ),
        "why": "a last row that reads those before it is clipped as if it did not",
    },
    {
        "name": "values_of_workers_rows_not_compared",
        "kind": "sampling",
        "file": "tfdpsq/privacy/workers.py",
        "old": "content(values))",
        "new": "str(values.shape).encode())",
        "tests": (
            "tests/privacy/test_workers.py::"
            "test_any_difference_between_the_workers_rows_ends_them",
        ),
        "why": "workers with other seeds would each differentiate the same row",
    },
    {
        "name": "workers_rows_compared_for_the_first_step_alone",
        "kind": "sampling",
        "file": "tfdpsq/privacy/workers.py",
        "old": "    for batch in batches:\n",
        "new": "    for batch in batches[:1]:\n",
        "tests": (
            "tests/privacy/test_workers.py::"
            "test_any_difference_between_the_workers_rows_ends_them",
        ),
        "why": "from a loop's second step on a row is in two workers' shares",
    },
    {
        "name": "workers_that_differ_go_on",
        "kind": "sampling",
        "file": "tfdpsq/privacy/workers.py",
        "old": "if len(set(gathered(digest))) > 1:",
        "new": "if len(set(gathered(digest))) > 2:",
        "tests": (
            "tests/privacy/test_workers.py::"
            "test_any_difference_between_the_workers_rows_ends_them",
        ),
        "why": "two workers are never more than two digests",
    },
    {
        "name": "noise_of_the_choice_rounded_near_its_end",
        "kind": "precision",
        "file": "tfdpsq/privacy/proof/choice.py",
        "old": "exponential = -math.log1p(-((whole - odd) / whole))",
        "new": "exponential = max(-math.log(odd / whole), 2.0**-1074)",
        "tests": (
            "tests/privacy/test_choice.py::"
            "test_noise_is_off_by_no_more_than_the_stated_rounding",
        ),
        "why": "an unlikely candidate is drawn more often than e^ε allows",
    },
    {
        "name": "padding_holds_row_zero",
        "kind": "sampling",
        "file": "tfdpsq/privacy/batches.py",
        "old": "            batch[name][weights == 0] = 0\n",
        "new": "            pass\n",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_padding_rows_hold_zeros_and_not_row_zero_of_the_data",
        ),
        "why": "a loss over the whole batch reads row zero though it was not drawn",
    },
    {
        "name": "empty_key_makes_plain_hashes",
        "kind": "release",
        "file": "tfdpsq/run/core/sources.py",
        "old": 'rb"[0-9a-f]{64}"',
        "new": 'rb"[0-9a-f]*"',
        "tests": (
            "tests/run/test_releases.py::test_a_damaged_key_makes_no_fingerprint",
        ),
        "why": "guesses of the private data can be tested on the release",
    },
    {
        "name": "steps_timed_in_strict_mode",
        "kind": "reads",
        "file": "tfdpsq/run/core/progress.py",
        "old": 'point_log.PointLog(directory, "step", timed=measured)',
        "new": 'point_log.PointLog(directory, "step", timed=True)',
        "tests": (
            "tests/run/test_progress.py::"
            "test_in_strict_mode_steps_and_epsilon_are_all_there_is",
        ),
        "why": "the time of a step shows how many rows it drew",
    },
    {
        "name": "certificate_in_a_public_output_let_through",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "    if output.guarantee == PUBLIC:\n        if found:\n",
        "new": "    if output.guarantee == PUBLIC:\n        if len(found) > 1:\n",
        "tests": (
            "tests/run/test_releases.py::test_what_was_made_must_have_what_was_stated",
        ),
        "why": "what private queries had a part in goes out as public",
    },
    {
        "name": "a_diverged_run_goes_on_to_the_broken_step",
        "kind": "ledger",
        "file": "tfdpsq/privacy/loop.py",
        "old": "diverged_at, end, stop = done, now.start, False",
        "new": "diverged_at, end, stop = done, done, False",
        "tests": (
            "tests/privacy/test_model.py::"
            "test_a_fit_that_diverges_has_spent_the_whole_plan",
        ),
        "why": "weights that are not finite are given out as those from before",
    },
    {
        "name": "seeds_of_any_size_taken",
        "kind": "keys",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "not 0 <= value < 1 << bits",
        "new": "value < 0",
        "tests": ("tests/privacy/test_kept_seeds.py::test_damaged_seeds_are_named",),
        "why": "a damaged seed is cut to the bits that fit: the steps are other ones",
    },
    {
        "name": "forget_leaves_the_rows_of_a_killed_training",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "[checkpoint.STATE, layout.ROWS]",
        "new": "[checkpoint.STATE]",
        "tests": (
            "tests/run/test_forget.py::"
            "test_all_that_killed_stages_write_in_private_is_known",
        ),
        "why": "tokenised private queries outlive what was to delete them",
    },
)
