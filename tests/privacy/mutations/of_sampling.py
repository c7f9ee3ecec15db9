"""Mistakes in who is drawn, and in what that is said to cost."""

_TESTS = "tests/privacy/"

MUTATIONS = (
    {
        "name": "sampler_keeps_the_first_rows",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": """\
        chosen = random.choice(
            self.n, size=min(int(drawn), self.max_batch_size), replace=False
        )
""",
        "new": """\
        chosen = random.choice(self.n, size=int(drawn), replace=False)
        chosen = np.sort(chosen)[: self.max_batch_size]
""",
        "tests": (
            _TESTS + "test_statistics_sampling.py::"
            "test_truncation_keeps_a_uniformly_random_subset",
        ),
        "why": "the first rows take part more often than they are accounted for",
    },
    {
        "name": "workers_draw_for_themselves",
        "kind": "sampling",
        "file": "tfdpsq/privacy/training.py",
        "old": "    seed = workers.chiefs_number(seed)\n",
        "new": "",
        "tests": (
            _TESTS + "test_workers.py::"
            "test_two_workers_train_what_one_would_and_pay_once",
        ),
        "why": "a row can be in the shares of two workers, and moves the sum by 2·C",
    },
    {
        "name": "batches_of_fixed_size",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "        drawn = random.binomial(self.n, self.sampling_probability)\n",
        "new": "        drawn = round(self.n * self.sampling_probability)\n",
        "tests": (
            _TESTS + "test_statistics_sampling.py::test_poisson_batches_are_poisson",
        ),
        "why": "what is accounted for is Poisson sampling, where neighbours differ "
        "in one row and not in two",
    },
    {
        "name": "rows_drawn_twice",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "            self.n, size=min(int(drawn), self.max_batch_size), "
        "replace=False\n",
        "new": "            self.n, size=min(int(drawn), self.max_batch_size)\n",
        "tests": (
            _TESTS + "test_statistics_sampling.py::test_poisson_batches_are_poisson",
        ),
        "why": "a row that is in a batch twice moves the sum by 2·C",
    },
    {
        "name": "sampling_probability_from_the_actual_number",
        "kind": "sampling",
        "file": "tfdpsq/privacy/plan.py",
        "old": "                units, self.sampling_probability, self.max_batch_size, "
        "seed\n",
        "new": "                units, spec.batch_size / units, self.max_batch_size, "
        "seed\n",
        "tests": (
            _TESTS + "test_plan.py::test_fewer_units_than_the_bound_are_sampled_with_"
            "the_bounds_probability",
        ),
        "why": "units are drawn more often than they are accounted for",
    },
    {
        "name": "shuffle_accounted_as_poisson",
        "kind": "composition",
        "file": "tfdpsq/privacy/plan.py",
        "old": '        if self.spec.sampler == "poisson":\n',
        "new": "        if True:\n",
        "tests": (
            _TESTS + "test_plan.py::test_shuffled_batches_are_accounted_for_epoch_by_"
            "epoch_without_amplification",
        ),
        "why": "an ε that does not hold for what ran, in most of the literature",
    },
    {
        "name": "truncations_delta_left_out",
        "kind": "composition",
        "file": "tfdpsq/privacy/plan.py",
        "old": """\
        return accounting.truncation_delta(
            self.spec.num_units, self.sampling_probability, self.max_batch_size, steps
        )
""",
        "new": """\
        return 0.0
""",
        "tests": (
            _TESTS + "test_calibration.py::"
            "test_a_batch_size_of_the_users_choice_is_calibrated_for",
            _TESTS + "test_spec.py::test_truncation_that_uses_up_delta_is_refused",
        ),
        "why": "a truncated batch depends on all others of the batch",
    },
    {
        "name": "rounding_of_pld_left_in_delta",
        "kind": "composition",
        "file": "tfdpsq/privacy/accounting.py",
        "old": "        delta -= rounding\n",
        "new": "",
        "tests": (
            _TESTS + "test_accounting.py::"
            "test_rounding_never_makes_epsilon_by_pld_too_small",
        ),
        "why": "epsilon is what the rounding errors of a Fourier transform left of it",
    },
    {
        "name": "pld_at_a_delta_of_its_rounding",
        "kind": "composition",
        "file": "tfdpsq/privacy/accounting.py",
        "old": "LEAST_DELTA_IN_ROUNDING = 100\n",
        "new": "LEAST_DELTA_IN_ROUNDING = 1e-3\n",
        "tests": (
            _TESTS + "test_accounting.py::"
            "test_rounding_never_makes_epsilon_by_pld_too_small",
        ),
        "why": "epsilon is what the rounding errors of a Fourier transform left of it",
    },
    {
        "name": "plans_whose_certificates_do_not_verify",
        "kind": "composition",
        "file": "tfdpsq/privacy/plan.py",
        "old": "    if not by_rdp <= LARGEST_EPSILON:\n",
        "new": "    if False:\n",
        "tests": (
            _TESTS + "test_calibration.py::"
            "test_a_plan_whose_certificate_would_not_verify_is_refused",
        ),
        "why": "a budget is paid for a certificate that nobody accepts",
    },
    {
        "name": "delta_below_the_errors_of_the_accountant",
        "kind": "composition",
        "file": "tfdpsq/privacy/accounting.py",
        "old": "if delta < small and spent_by",
        "new": "if delta < 1e-18 and spent_by",
        "tests": (
            _TESTS + "test_calibration.py::"
            "test_a_delta_below_the_rounding_errors_of_pld_is_refused[1e-16]",
        ),
        "why": "the budget is paid for a model of noise",
    },
    {
        "name": "steps_not_composed",
        "kind": "composition",
        "file": "tfdpsq/privacy/accounting.py",
        "old": "    return dp_accounting.SelfComposedDpEvent(one, steps)\n",
        "new": "    return dp_accounting.SelfComposedDpEvent(one, 1)\n",
        "tests": (
            _TESTS + "test_accounting.py::"
            "test_gaussian_releases_against_the_closed_form",
        ),
        "why": "ε of one step for all of them; calibration would agree with it",
    },
    {
        "name": "delta_of_a_whole_record_accepted",
        "kind": "composition",
        "file": "tfdpsq/privacy/spec.py",
        "old": "self.delta >= 1 / self.num_units:\n",
        "new": "self.delta >= 1:\n",
        "tests": (
            _TESTS + "test_spec.py::test_two_values_that_clash_are_both_named_with_"
            "a_way_out",
        ),
        "why": "at δ = 1/n, publishing one record counts as private",
    },
    {
        "name": "rows_drawn_where_users_are_protected",
        "kind": "sampling",
        "file": "tfdpsq/privacy/plan.py",
        "old": "        if groups is None:\n            return chosen\n",
        "new": "        return chosen\n",
        "tests": (
            _TESTS + "test_plan.py::test_a_plan_for_users_draws_users_and_rows_of_each",
        ),
        "why": "a user of many rows takes part in many steps",
    },
    {
        "name": "offsets_that_fall_unsigned",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "values.astype(np.int64, copy=False)",
        "new": "values",
        "tests": ("tests/privacy/test_sampling.py::test_what_does_not_fit_is_refused",),
        "why": "two users own one row: leaving one of them out does not leave it out",
    },
    {
        "name": "rows_that_round_to_one",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": 'if values.dtype.kind not in "iu":',
        "new": 'if values.dtype.kind not in "iuf":',
        "tests": ("tests/privacy/test_sampling.py::test_what_does_not_fit_is_refused",),
        "why": "two users own one row: leaving one of them out does not leave it out",
    },
    {
        "name": "last_microbatch_left_out_if_not_full",
        "kind": "sampling",
        "file": "tfdpsq/privacy/step.py",
        "old": "used = (count + size - 1) // size",
        "new": "used = count // size",
        "tests": (
            "tests/privacy/test_optimizers.py::"
            "test_engines_and_microbatch_sizes_give_the_same_training",
        ),
        "why": "a row more lets all rows of the last microbatch in, or none",
    },
    {
        "name": "an_epoch_has_a_batch_too_many",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "        self.steps_per_epoch = n // batch_size\n",
        "new": "        self.steps_per_epoch = -(-n // batch_size)\n",
        "tests": (
            "tests/privacy/test_sampling.py::"
            "test_a_shuffled_epoch_is_a_permutation_cut_into_equal_batches",
            "tests/privacy/test_plan.py::"
            "test_no_epoch_shows_a_unit_twice_nor_more_epochs_than_counted",
        ),
        "why": "the last batch of an epoch has units that were in it before",
    },
    {
        "name": "owners_of_any_labels",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "        _require_labels(labels, owners)\n",
        "new": "",
        "tests": ("tests/privacy/test_sampling.py::test_what_does_not_fit_is_refused",),
        "why": "several persons are one unit, of which one moves the sum by 2C",
    },
    {
        "name": "owners_in_a_list_as_numpy_takes_them",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "np.asarray(labels) if given else np.asarray(labels, object)",
        "new": "np.asarray(labels)",
        "tests": ("tests/privacy/test_sampling.py::test_what_does_not_fit_is_refused",),
        "why": "all rows without an owner are one owner's",
    },
)
