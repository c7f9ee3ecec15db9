"""Mistakes in what callbacks and hooks, which see private losses, may set."""

_CALLBACKS = "tests/privacy/test_callbacks.py::"
_RATES = _CALLBACKS + "test_rates_that_no_epsilon_covers_are_refused"
_INPUTS = "tests/privacy/test_fit_inputs.py::"
_PAID = "tests/privacy/test_paid_steps.py::"

MUTATIONS = (
    {
        "name": "callbacks_that_set_rates_accepted_where_nothing_is_kept",
        "kind": "reads",
        "file": "tfdpsq/privacy/model.py",
        "old": "if directory is not None or self.plan.spec.private:",
        "new": "if directory is not None:",
        "tests": (_RATES,),
        "why": "the rate, and with it the weights, follow from a loss without noise",
    },
    {
        "name": "rates_looked_at_only_where_steps_are_repeated",
        "kind": "reads",
        "file": "tfdpsq/privacy/training.py",
        "old": "_held(watched), plan.spec.private)",
        "new": "_held(watched), repeats and plan.spec.private)",
        "tests": (_RATES,),
        "why": "a callback sets the rate by a private loss, and ε does not tell",
    },
    {
        "name": "weights_chosen_after_the_last_step",
        "kind": "reads",
        "file": "tfdpsq/privacy/model.py",
        "old": "            unchanging.restore()\n",
        "new": "            pass\n",
        "tests": (
            _CALLBACKS + "test_weights_that_a_callback_chooses_are_not_those_certified",
        ),
        "why": "the weights certified are those with the best private loss",
    },
    {
        "name": "weights_of_the_last_step_as_a_hook_left_them",
        "kind": "reads",
        "file": "tfdpsq/privacy/loop.py",
        "old": "        if last:\n            self.unchanging.restore()\n",
        "new": "",
        "tests": (
            _PAID + "test_weights_that_a_hook_sets_reach_no_result_and_no_saved_state",
        ),
        "why": "a hook that has seen the losses chooses the weights that are certified",
    },
    {
        "name": "hooks_trusted_by_default",
        "kind": "reads",
        "file": "tfdpsq/privacy/training.py",
        "old": "    hooks_may_write: bool = True,\n",
        "new": "    hooks_may_write: bool = False,\n",
        "tests": (
            _PAID + "test_weights_that_a_hook_sets_reach_no_result_and_no_saved_state",
        ),
        "why": "weights are set by private losses, and the certificate does not tell",
    },
    {
        "name": "seeds_in_a_folder_that_is_released",
        "kind": "release",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "    for spelling in (path, os.path.realpath(path)):",
        "new": "    for spelling in (path,):",
        "tests": (_INPUTS + "test_seeds_are_kept_in_no_directory_that_is_released",),
        "why": "through a link the seeds of the noise are published with the weights",
    },
    {
        "name": "largest_values_of_rows_not_tried",
        "kind": "ledger",
        "file": "tfdpsq/privacy/fit_inputs.py",
        "old": "{int(rows[each.argmin()]), int(rows[each.argmax()])}",
        "new": "{int(rows[each.argmin()])}",
        "tests": (
            _INPUTS
            + "test_one_row_that_the_loss_refuses_is_found_before_a_step_is_paid",
        ),
        "why": "steps are paid for, and the run can neither go on nor begin again",
    },
    {
        "name": "variables_of_a_schedule_left_to_callbacks",
        "kind": "reads",
        "file": "tfdpsq/privacy/compiled.py",
        "old": "        self.read = made.variables\n",
        "new": "",
        "tests": (_CALLBACKS + "test_a_rate_in_a_variable_is_set_by_no_callback",),
        "why": "the rate follows from a private loss, and no configuration tells of it",
    },
    {
        "name": "certificate_of_weights_that_were_loaded",
        "kind": "certificate",
        "file": "tfdpsq/privacy/model.py",
        "old": "return same and digest_of_weights(self._weights) == self.digest",
        "new": "return same and bool(self.digest)",
        "tests": (
            _CALLBACKS + "test_weights_that_are_loaded_after_fit_have_no_certificate",
        ),
        "why": "weights of the step with the best private loss look as if noised alone",
    },
    {
        "name": "metrics_that_a_loss_reads_left_to_callbacks",
        "kind": "reads",
        "file": "tfdpsq/privacy/training.py",
        "old": "for variable in metric.variables} - named",
        "new": "for variable in metric.variables}",
        "tests": (
            _CALLBACKS + "test_what_a_loss_reads_of_a_metric_is_set_by_no_callback",
        ),
        "why": "a callback hands a private loss to the next step through a metric",
    },
    {
        "name": "validation_not_watched",
        "kind": "reads",
        "file": "tfdpsq/privacy/model.py",
        "old": "watched = bool(callbacks) or validation_data is not None",
        "new": "watched = bool(callbacks)",
        "tests": (
            _CALLBACKS + "test_validation_leaves_nothing_of_its_rows_in_the_model",
        ),
        "why": "a layer keeps the mean of private rows when they are evaluated",
    },
    {
        "name": "arrays_of_groups_left_to_callbacks",
        "kind": "sampling",
        "file": "tfdpsq/privacy/training.py",
        "old": "    if groups is None or not copied:\n",
        "new": "    if True:\n",
        "tests": (
            _CALLBACKS
            + "test_units_are_those_of_before_whatever_a_callback_makes_of_the_arrays",
        ),
        "why": "one row stands for all units, each clipped by itself",
    },
    {
        "name": "a_fit_inside_a_fit",
        "kind": "ledger",
        "file": "tfdpsq/privacy/model.py",
        "old": '        self._require_idle("fit")\n',
        "new": "",
        "tests": (
            _CALLBACKS
            + "test_a_certificate_is_of_what_ran_whatever_stands_in_its_place",
        ),
        "why": "the inner run's steps are in no count",
    },
    {
        "name": "certificate_of_an_exchanged_plan",
        "kind": "certificate",
        "file": "tfdpsq/privacy/model.py",
        "old": "same = plan is self.plan and model is self.model",
        "new": "same = True",
        "tests": (
            _CALLBACKS
            + "test_a_certificate_is_of_what_ran_whatever_stands_in_its_place",
        ),
        "why": "weights of another model are said to be those of the plan",
    },
    {
        "name": "noise_of_another_plan_in_later_steps",
        "kind": "noise",
        "file": "tfdpsq/privacy/loop.py",
        "old": "if not all(one is other for one, other in",
        "new": "if not all(one or True for one, other in",
        "tests": (_CALLBACKS + "test_the_noise_of_later_steps_is_set_by_no_callback",),
        "why": "a callback sets seeds that it knows, or less noise than is stated",
    },
    {
        "name": "preempted_not_watched",
        "kind": "reads",
        "file": "tfdpsq/privacy/loop.py",
        "old": "asked = self._watched(preempted, done)",
        "new": "asked = preempted()",
        "tests": (_PAID + "test_what_preempted_sets_is_set_back",),
        "why": "what on_step has seen of losses is put into a weight after it",
    },
    {
        "name": "statistics_of_rows_need_no_declaration",
        "kind": "reads",
        "file": "tfdpsq/privacy/fit_inputs.py",
        "old": "    if found and not declared:",
        "new": '    if found and declared == "private":',
        "tests": (
            "tests/privacy/test_model_certificate.py::"
            "test_statistics_of_rows_are_released_only_where_their_owner_is_declared",
        ),
        "why": "the mean of the rows is released, exactly, under a clean certificate",
    },
    {
        "name": "private_statistics_are_no_read",
        "kind": "reads",
        "file": "tfdpsq/privacy/model.py",
        "old": 'if adapted and self._adapted_to == "private":',
        "new": 'if adapted and self._adapted_to == "public":',
        "tests": (
            "tests/privacy/test_model_certificate.py::"
            "test_statistics_of_rows_are_released_only_where_their_owner_is_declared",
        ),
        "why": "nobody learns that the weights hold statistics which no noise covers",
    },
    {
        "name": "noise_of_a_chosen_seed_is_certified",
        "kind": "keys",
        "file": "tfdpsq/privacy/model.py",
        "old": "        if self.plan.spec.private and self._directory is None:\n"
        "            ran.",
        "new": "        if self.plan.spec.secure and self._directory is None:\n"
        "            ran.",
        "tests": (
            "tests/privacy/test_model_certificate.py::"
            "test_noise_of_a_seed_that_somebody_chose_has_none",
        ),
        "why": "the noise can be subtracted by guessing the seed",
    },
)
