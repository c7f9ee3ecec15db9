"""Mistakes in what a step that is taken again, or cannot be taken, depends on."""

_PAID = "tests/privacy/test_paid_steps.py::"
_FIT = "tests/privacy/test_model.py::"
_CALLBACKS = "tests/privacy/test_callbacks.py::"
_RATES = _CALLBACKS + "test_rates_that_no_epsilon_covers_are_refused"

_COMPUTED = "tests/privacy/test_computation.py::"

MUTATIONS = (
    {
        "name": "what_model_and_loss_compute_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "            if name in before:  # older",
        "new": "            if name not in settings:  # older",
        "tests": (
            _COMPUTED
            + "test_a_fit_goes_on_with_the_model_and_the_loss_that_it_began_with",
        ),
        "why": "a killed run repeats its steps with another loss and the same noise",
    },
    {
        "name": "what_model_and_loss_compute_not_kept",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": "settings[checkpoint.COMPUTED] = _described(",
        "new": "_described(",
        "tests": (
            _COMPUTED
            + "test_a_fit_goes_on_with_the_model_and_the_loss_that_it_began_with",
        ),
        "why": "a killed run repeats its steps with another loss and the same noise",
    },
    {
        "name": "settings_of_operations_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": "_hashed([node.op, *settings, ",
        "new": "_hashed([node.op, ",
        "tests": (_COMPUTED + "test_whatever_is_computed_otherwise_is_told",),
        "why": "a killed run repeats its steps with other dropout and the same noise",
    },
    {
        "name": "functions_that_a_loss_calls_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": "            return self._of_function(value.func.name)\n",
        "new": '            return ""\n',
        "tests": (_COMPUTED + "test_whatever_is_computed_otherwise_is_told",),
        "why": "a killed run repeats its steps with another loss and the same noise",
    },
    {
        "name": "weights_that_a_loss_reads_not_told_apart",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": 'f"variable {place}")',
        "new": '"variable")',
        "tests": (_COMPUTED + "test_whatever_is_computed_otherwise_is_told",),
        "why": "a loss with weights exchanged is another one, under the same noise",
    },
    {
        "name": "gradient_of_coupled_rows_not_looked_into",
        "kind": "resumes",
        "file": "tfdpsq/privacy/replay.py",
        "old": "made = found.gradient(tf.one_hot(0, rows), variables)\n",
        "new": "made = []\n",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_what_only_the_gradient_draws_is_found",
        ),
        "why": "a gradient that draws is another one when its step is repeated",
    },
    {
        "name": "gradients_written_by_hand_not_looked_into",
        "kind": "resumes",
        "file": "tfdpsq/privacy/replay.py",
        "old": "                gradients = tape.gradient(values, variables)\n",
        "new": "                pass\n",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_what_only_the_gradient_draws_is_found",
        ),
        "why": "a gradient that draws is another one when its step is repeated",
    },
    {
        "name": "weights_not_trained_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "if before.get(name, value) != value:",
        "new": "if not before.get(name, value):",
        "tests": (_PAID + "test_weights_that_no_state_has_must_be_as_they_were",),
        "why": "a killed run goes on with other frozen weights under the same noise",
    },
    {
        "name": "weights_not_trained_told_by_shape_alone",
        "kind": "resumes",
        "file": "tfdpsq/privacy/batches.py",
        "old": ".encode() + held\n",
        "new": ".encode()\n",
        "tests": (_PAID + "test_weights_that_no_state_has_must_be_as_they_were",),
        "why": "a killed run goes on with other frozen weights under the same noise",
    },
    {
        "name": "paid_steps_of_a_fit_that_took_none_left_out",
        "kind": "resumes",
        "file": "tfdpsq/privacy/model.py",
        "old": "        ran = epoch.executed if paid is None else paid\n",
        "new": """\
        ran = epoch.executed if paid is None or not epoch.executed else paid
""",
        "tests": (_FIT + "test_a_fit_that_goes_on_counts_what_was_paid_before_it",),
        "why": "ε of a run that goes on and ends before a step is 0",
    },
    {
        "name": "arrays_of_fit_left_to_callbacks",
        "kind": "resumes",
        "file": "tfdpsq/privacy/model.py",
        "old": "            data = tf.nest.map_structure(np.array, data)\n",
        "new": "            pass\n",
        "tests": (
            _CALLBACKS + "test_arrays_that_a_callback_changes_are_not_those_of_fit",
        ),
        "why": "a killed run repeats its steps on other rows under the same noise",
    },
    {
        "name": "steps_of_fit_counted_by_iterations",
        "kind": "resumes",
        "file": "tfdpsq/privacy/model.py",
        "old": "        ran = epoch.executed if paid is None else paid\n",
        "new": """\
        ran = int(self.optimizer.iterations) if paid is None else paid
""",
        "tests": (_RATES,),
        "why": "a step that was announced to callbacks, and failed, is in no count",
    },
    {
        "name": "iterations_set_back_in_a_run_that_resumes",
        "kind": "resumes",
        "file": "tfdpsq/privacy/loop.py",
        "old": "        if iterations != step:\n",
        "new": "        if False:\n",
        "tests": (_PAID + "test_iterations_that_a_hook_sets_are_refused",),
        "why": "a killed run repeats its steps at other rates and with the same noise",
    },
    {
        "name": "settings_of_the_optimizer_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/loop.py",
        "old": "                self.unchanging.require_same(done)\n",
        "new": "                pass\n",
        "tests": (_RATES,),
        "why": "a killed run repeats its steps with other rates and the same noise",
    },
    {
        "name": "settings_other_than_the_rate_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/loop.py",
        "old": "            if value != self._began[name]:",
        "new": "            if name == 'learning_rate' and value != self._began[name]:",
        "tests": (
            "tests/privacy/test_callbacks.py::"
            "test_no_setting_of_the_optimizer_is_set_by_a_callback",
        ),
        "why": "a private loss reaches the weights by a step that is traced again",
    },
    {
        "name": "iterations_set_forward_accepted",
        "kind": "resumes",
        "file": "tfdpsq/privacy/loop.py",
        "old": "        if iterations != step:\n",
        "new": "        if iterations < step:\n",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_iterations_are_set_by_no_hook[9]",
        ),
        "why": "the rate follows from a private loss, by a schedule that skips ahead",
    },
    {
        "name": "rows_saved_as_a_checkpoint_accepted",
        "kind": "reads",
        "file": "tfdpsq/privacy/independence.py",
        "old": "|WriteFile|Save\\w*|",
        "new": "|WriteFile|",
        "tests": (
            "tests/privacy/test_independence.py::"
            "test_what_keeps_outside_of_variables_is_found[SaveV2]",
        ),
        "why": "a loss writes rows to a file as they are",
    },
    {
        "name": "callbacks_that_set_rates_accepted",
        "kind": "resumes",
        "file": "tfdpsq/privacy/model.py",
        "old": "if directory is not None or self.plan.spec.private:",
        "new": "if directory is None:",
        "tests": (_RATES,),
        "why": "a killed run repeats its steps with other rates and the same noise",
    },
    {
        "name": "callbacks_may_change_weights",
        "kind": "resumes",
        "file": "tfdpsq/privacy/model.py",
        "old": "hooks_may_write=watched",
        "new": "hooks_may_write=False",
        "tests": (
            "tests/privacy/test_paid_steps.py::"
            "test_weights_that_callbacks_change_are_refused_before_the_next_step",
        ),
        "why": "a killed run repeats its steps from other weights and the same noise",
    },
    {
        "name": "frozen_weights_elsewhere_left_out",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": "_not_trained(read, [*variables, *state])",
        "new": "_not_trained(layers, [*variables, *state])",
        "tests": (
            "tests/privacy/test_paid_steps.py::"
            "test_frozen_weights_that_no_layer_of_the_list_holds_are_compared",
        ),
        "why": "paid steps are repeated on other features under the same noise",
    },
    {
        "name": "state_that_hooks_read_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": "watched = [*read, *state, *take",
        "new": "watched = [*read, *take",
        "tests": (
            "tests/privacy/test_paid_steps.py::test_state_that_only_hooks_read_is_compared",
        ),
        "why": "a killed run does not repeat what a hook wrote into it",
    },
    {
        "name": "a_second_directory_for_the_same_fit",
        "kind": "ledger",
        "file": "tfdpsq/privacy/model.py",
        "old": "same = directory == self._directory and head == self._ledger_head",
        "new": "same = True",
        "tests": (
            "tests/privacy/test_model.py::test_a_fit_in_another_directory_would_spend_twice_and_is_refused",
        ),
        "why": "a second ledger, of which epsilon() knows nothing",
    },
    {
        "name": "one_dropout_for_all_steps",
        "kind": "keys",
        "file": "tfdpsq/privacy/step.py",
        "old": "keys.dropout, keys.number, number",
        "new": "keys.dropout, 0, number",
        "tests": (
            "tests/privacy/test_statistics.py::test_every_step_has_dropout_of_its_own",
        ),
        "why": "masks that are learned in one step are those of all",
    },
    {
        "name": "files_written_by_a_loss_not_found",
        "kind": "release",
        "file": "tfdpsq/privacy/independence.py",
        "old": r'r"|WriteFile|Save\w*',
        "new": r'r"|Save\w*',
        "tests": (
            "tests/privacy/test_independence.py::test_what_keeps_outside_of_variables_is_found[WriteFile]",
        ),
        "why": "rows are written to a file",
    },
    {
        "name": "staging_areas_not_found",
        "kind": "release",
        "file": "tfdpsq/privacy/independence.py",
        "old": r'r"Stage|(Ordered)?MapStage|',
        "new": 'r"',
        "tests": (
            "tests/privacy/test_independence.py::test_what_keeps_outside_of_variables_is_found[Stage]",
        ),
        "why": "rows are kept by the runtime",
    },
    {
        "name": "variables_by_reference_not_found",
        "kind": "release",
        "file": "tfdpsq/privacy/independence.py",
        "old": " or given.is_ref\n",
        "new": "\n",
        "tests": (
            "tests/privacy/test_independence.py::test_what_keeps_outside_of_variables_is_found[AssignAdd]",
        ),
        "why": "rows are kept in a variable of TensorFlow 1",
    },
    {
        "name": "rows_drawn_when_they_are_taken_let_through",
        "kind": "resumes",
        "file": "tfdpsq/privacy/trials.py",
        "old": "        require_same_rows(batch, rows.few())\n",
        "new": "        pass\n",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_rows_that_are_drawn_when_they_are_taken_are_refused",
        ),
        "why": "a killed run repeats its steps on other rows under the same noise",
    },
    {
        "name": "paid_before_xla_has_seen_the_step",
        "kind": "ledger",
        "file": "tfdpsq/privacy/compiled.py",
        "old": "            if self._jit_compile:\n",
        "new": "            if False:\n",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_what_xla_does_not_have_costs_nothing",
        ),
        "why": "a step is paid for that never ran, in a directory of no further use",
    },
    {
        "name": "paid_before_memory_was_tried",
        "kind": "ledger",
        "file": "tfdpsq/privacy/training.py",
        "old": "loop.rehearse = functools.partial(take_steps.rehearse, batch)",
        "new": "pass",
        "tests": (
            "tests/privacy/test_rehearsal.py::"
            "test_a_microbatch_that_memory_does_not_hold_costs_nothing",
        ),
        "why": "a step is paid for in a directory that no smaller microbatch can use",
    },
    {
        "name": "rehearsal_left_in_the_weights",
        "kind": "ledger",
        "file": "tfdpsq/privacy/loop.py",
        "old": "            raise\n        self._restored()\n",
        "new": "            raise\n",
        "tests": (
            "tests/privacy/test_rehearsal.py::test_it_leaves_nothing_behind[rows]",
        ),
        "why": "the weights have one more step than was paid for",
    },
    {
        "name": "order_of_inputs_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": 'inputs = sorted(inputs) if node.op == "AddN" else inputs',
        "new": "inputs = sorted(inputs)",
        "tests": (
            _COMPUTED
            + "test_the_same_operations_connected_otherwise_are_told_apart[order]",
        ),
        "why": "a difference turned around goes on under the same noise",
    },
    {
        "name": "captured_numbers_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": "str(values.shape), content])",
        "new": "str(values.shape)])",
        "tests": (
            _COMPUTED
            + "test_the_same_operations_connected_otherwise_are_told_apart[numbers]",
        ),
        "why": "other class weights go on under the same noise",
    },
    {
        "name": "results_of_operations_not_told_apart",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": 'return f"{found[node]}:{which or 0}"',
        "new": "return found[node]",
        "tests": (
            _COMPUTED
            + "test_the_same_operations_connected_otherwise_are_told_apart[results]",
        ),
        "why": "the loss of another output goes on under the same noise",
    },
    {
        "name": "arguments_of_functions_not_told_apart",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": 'each.name: f"argument {place}" for place',
        "new": 'each.name: "argument" for place',
        "tests": (
            _COMPUTED
            + "test_the_same_operations_connected_otherwise_are_told_apart[arguments]",
        ),
        "why": "a function turned around goes on under the same noise",
    },
    {
        "name": "a_part_of_a_tables_entries_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": "    return _hashed([*kinds, *entries])\n",
        "new": "    return _hashed([*kinds, *entries[: keys.shape[-1]]])\n",
        "tests": (_COMPUTED + "test_whatever_is_computed_otherwise_is_told",),
        "why": "with another table, paid steps repeat on other sums, same noise",
    },
    {
        "name": "content_of_tables_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": 'f"resource {place} {content}"',
        "new": 'f"resource {place}"',
        "tests": (_COMPUTED + "test_whatever_is_computed_otherwise_is_told",),
        "why": "other class weights in a table go on under the same noise",
    },
    {
        "name": "a_given_seed_of_samples_taken_where_one_is_kept",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": "    _require_no_seed(directory, sampler_seed)\n",
        "new": "",
        "tests": (
            "tests/privacy/test_kept_seeds.py::"
            "test_a_seed_of_samples_is_refused_where_a_directory_keeps_one",
        ),
        "why": "what was given is not what is drawn by, or a paid step has other rows",
    },
    {
        "name": "noise_left_out_of_the_plans_fingerprint",
        "kind": "resumes",
        "file": "tfdpsq/privacy/plan.py",
        "old": '            "noise_multiplier": self.noise_multiplier,\n',
        "new": "",
        "tests": (
            "tests/privacy/test_plan.py::"
            "test_the_fingerprint_is_of_all_that_decides_what_runs",
        ),
        "why": "a run goes on with less noise than its ledger was opened for",
    },
    {
        "name": "largest_batch_left_out_of_the_plans_fingerprint",
        "kind": "resumes",
        "file": "tfdpsq/privacy/plan.py",
        "old": (
            '            "max_batch_size": self.max_batch_size,\n            "noise'
        ),
        "new": ' "noise',
        "tests": (
            "tests/privacy/test_plan.py::"
            "test_the_fingerprint_is_of_all_that_decides_what_runs",
        ),
        "why": "paid steps are repeated on more rows, under the same noise",
    },
    {
        "name": "scheme_of_draws_not_compared_on_resume",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": '        "random_numbers": SCHEME,\n',
        "new": "",
        "tests": (
            "tests/privacy/test_kept_seeds.py::"
            "test_a_run_goes_on_with_the_draws_of_its_own_version_only",
        ),
        "why": "another version repeats paid steps with other draws",
    },
    {
        "name": "state_of_another_model_restored",
        "kind": "resumes",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "value.shape) for value in values] != shapes:",
        "new": "value.shape) for value in values][:0]:",
        "tests": (
            "tests/privacy/test_kept_seeds.py::"
            "test_a_state_of_other_shapes_is_not_restored",
        ),
        "why": "bits of other weights are taken for those of this model",
    },
    {
        "name": "seeds_in_the_page_cache",
        "kind": "resumes",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": (
            "        file.write(content)\n"
            "        file.flush()\n"
            "        os.fsync(file.fileno())\n"
        ),
        "new": "        file.write(content)\n",
        "tests": (
            "tests/privacy/test_append_only.py::"
            "test_seeds_and_states_are_on_the_device_before_what_they_are_for",
        ),
        "why": "after a power failure paid steps cannot be repeated: all is lost",
    },
    {
        "name": "states_in_the_page_cache",
        "kind": "resumes",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": (
            "            file.flush()\n"
            "            os.fsync(file.fileno())\n"
            "        os.replace(partial, folder"
        ),
        "new": "        os.replace(partial, folder",
        "tests": (
            "tests/privacy/test_append_only.py::"
            "test_seeds_and_states_are_on_the_device_before_what_they_are_for",
        ),
        "why": "the same, of the weights that they start from",
    },
    {
        "name": "refused_values_in_the_cause_of_an_error",
        "kind": "release",
        "file": "tfdpsq/privacy/loop.py",
        "old": ('f"label beyond the number of classes. {remedy}"\n        ) from None'),
        "new": (
            'f"label beyond the number of classes. {remedy}"\n        ) from error'
        ),
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_no_kind_of_error_quotes_a_value_of_a_row",
            "tests/privacy/test_before_spending.py::"
            "test_what_is_tried_quotes_no_value_of_a_row",
        ),
        "why": "a traceback shows the cause, and in it a value of a row",
    },
    {
        "name": "a_run_without_the_setting_goes_on",
        "kind": "resumes",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "        if name not in before:\n            raise",
        "new": (
            "        if name not in before:\n            continue\n            raise"
        ),
        "tests": (
            "tests/privacy/test_kept_seeds.py::test_a_run_that_did_not_keep_a_setting_is_not_gone_on_with",
        ),
        "why": "paid steps could be repeated with other draws",
    },
    {
        "name": "seeds_of_another_ledger_accepted",
        "kind": "resumes",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "    if ledger is not None and ledger_before != ledger:\n",
        "new": "    if False:\n",
        "tests": (
            _PAID + "test_seeds_of_an_attempt_before_take_no_step_again",
            _PAID + "test_ledger_and_seeds_of_two_runs_do_not_go_on_together",
        ),
        "why": "all paid steps are taken again as others: a release that nobody counts",
    },
)
