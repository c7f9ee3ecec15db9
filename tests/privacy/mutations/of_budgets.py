"""Mistakes in what several releases cost together, and in what may be composed."""

_FILE = "tfdpsq/privacy/proof/budget.py"
_TESTS = "tests/privacy/test_budget.py::"
_FORGET = "tests/run/test_forget.py::"
_STAYS = "test_what_is_private_goes_and_what_proves_the_release_stays"

MUTATIONS = (
    {
        "name": "a_grid_paid_before_it_can_be_certified",
        "kind": "composition",
        "file": "tfdpsq/run/training/choice_points.py",
        "old": "            _require_certifiable(config, points, specs, delta)\n",
        "new": "            pass\n",
        "tests": (
            "tests/run/test_choose_inside.py::"
            "test_a_selection_that_cannot_be_certified_is_found_before_payment",
        ),
        "why": "the whole grid would be paid, and no certificate could be made",
    },
    {
        "name": "budget_takes_the_largest_release_for_all",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "            found.update(release.runs)\n",
        "new": "            found = found or dict(release.runs)\n",
        "tests": (_TESTS + "test_five_certificates_cost_what_dp_accounting_composes",),
        "why": "the total of five releases is said to be that of the first",
    },
    {
        "name": "budget_composes_other_pairs_as_the_same",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "if not one_log and not first.known & other.known:",
        "new": "if not one_log and not (first.known and other.known):",
        "tests": (_TESTS + "test_what_cannot_be_composed_is_refused_by_name",),
        "why": "nobody declared that these are one log, and a wrong total looks right",
    },
    {
        "name": "budget_takes_unknown_pairs_for_the_same",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "if not one_log and not first.known & other.known:",
        "new": "if not one_log and first.known != other.known:",
        "tests": (
            _TESTS + "test_pairs_without_a_fingerprint_are_not_taken_for_the_same",
        ),
        "why": "certificates that state no pairs pass for certificates of one log",
    },
    {
        "name": "budget_composes_other_units",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "if ours.unit != theirs.unit:",
        "new": "if ours.unit > theirs.unit:",
        "tests": (_TESTS + "test_what_cannot_be_composed_is_refused_by_name",),
        "why": "a query's guarantee is added to a user's, and holds for neither",
    },
    {
        "name": "budget_composes_other_neighbours",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "max(specs, key=lambda spec: spec.sampler ==",
        "new": "min(specs, key=lambda spec: spec.sampler ==",
        "tests": (
            _TESTS
            + "test_poisson_and_shuffled_releases_compose_for_units_that_are_replaced",
        ),
        "why": "a zero-out guarantee is composed as one of adding or removing",
    },
    {
        "name": "budget_composes_choices_for_replaced_units",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "        chosen or any(spec.clip_groups for spec in specs)\n",
        "new": "        any(spec.clip_groups for spec in specs)\n",
        "tests": (
            _TESTS + "test_choices_and_groups_are_not_composed_with_replaced_units",
        ),
        "why": "a choice is derived for units that are added or removed alone",
    },
    {
        "name": "budget_composes_groups_for_replaced_units",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "        chosen or any(spec.clip_groups for spec in specs)\n",
        "new": "        chosen\n",
        "tests": (
            _TESTS + "test_choices_and_groups_are_not_composed_with_replaced_units",
        ),
        "why": "an empty place in a group costs another unit its own",
    },
    {
        "name": "total_after_shuffled_batches_for_units_that_are_added",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/continuation.py",
        "old": "        adjacency=total.adjacency,\n",
        "new": "",
        "tests": (
            "tests/privacy/test_continuation.py::test_neighbours_are_those_of_all_runs",
        ),
        "why": "a zero-out guarantee passes for one of adding or removing",
    },
    {
        "name": "budget_compares_neighbouring_releases_only_with_themselves",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "difference(joined, r, one_log)",
        "new": "difference(r, r, one_log)",
        "tests": (_TESTS + "test_what_cannot_be_composed_is_refused_by_name",),
        "why": "anything is composed with anything",
    },
    {
        "name": "budget_believes_a_certificate_that_does_not_hold",
        "kind": "composition",
        "file": _FILE,
        "old": "    if problems:\n",
        "new": "    if len(problems) > 9:\n",
        "tests": (_TESTS + "test_forged_and_unprotected_certificates_are_refused",),
        "why": "an edited certificate lowers the total of all",
    },
    {
        "name": "budget_composes_an_unprotected_run",
        "kind": "composition",
        "file": _FILE,
        "old": '    if not certificate["private"]:\n',
        "new": '    if "private" not in certificate:\n',
        "tests": (_TESTS + "test_forged_and_unprotected_certificates_are_refused",),
        "why": "an unprotected release is part of a finite total",
    },
    {
        "name": "budget_counts_planned_steps",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/certified.py",
        "old": "{run_key(head, digest): plan_of(certificate)}",
        "new": "{run_key(head, digest): (plan_of(certificate)[0], 1)}",
        "tests": (_TESTS + "test_five_certificates_cost_what_dp_accounting_composes",),
        "why": "the steps that ran are what was spent",
    },
    {
        "name": "budget_counts_equal_certificates_once",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "if release.nameless and len(places) > 1:",
        "new": "if release.nameless and len(places) > 2:",
        "tests": (
            _TESTS + "test_runs_without_a_ledger_are_told_apart_by_their_certificates",
        ),
        "why": "two runs without a ledger are counted as copies of one",
    },
    {
        "name": "budget_tells_runs_apart_by_their_plan",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/certified.py",
        "old": "{run_key(head, digest): plan_of(certificate)}",
        "new": '{certificate["plan"]: plan_of(certificate)}',
        "tests": (
            _TESTS
            + "test_what_is_made_from_a_release_costs_nothing_and_a_second_run_does",
        ),
        "why": "a second run of the same settings draws new noise and costs again",
    },
    {
        "name": "budget_forgets_the_choice",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "+ sum(r.choice_epsilon or 0.0 for r in held_out)",
        "new": "+ max([r.choice_epsilon or 0.0 for r in held_out[:0]], default=0.0)",
        "tests": (_TESTS + "test_a_chosen_run_costs_all_runs_or_the_choice",),
        "why": "who was held out to choose pays for the choice and for all the rest",
    },
    {
        "name": "budget_counts_all_units_as_held_out",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "for size in range(len(choices) + 1):",
        "new": "for size in range(len(choices), len(choices) + 1):",
        "tests": (_TESTS + "test_a_chosen_run_costs_all_runs_or_the_choice",),
        "why": "who was trained on by a grid pays for all of its runs",
    },
    {
        "name": "budget_believes_one_of_two_costs_of_a_ledger",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "if (before[0].fingerprint, before[1]) != (run[0].fingerprint, run[1]):",
        "new": "if before[1] < run[1] < before[1]:",
        "tests": (_TESTS + "test_a_ledger_head_stands_for_one_run",),
        "why": "a copied ledger head makes two runs count as one",
    },
    {
        "name": "users_taken_to_be_in_one_log_of_time",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": 'return disjoint == USER or unit != "user"',
        "new": 'return disjoint == TIME or unit != "user"',
        "tests": (
            _TESTS + "test_disjoint_logs_cost_the_largest_and_users_are_in_all_logs"
            "_of_time",
        ),
        "why": "a user who searches every month pays for every month",
    },
    {
        "name": "disjoint_logs_may_hold_the_same_pairs",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "(log.pairs & other.pairs or _keys(log) & _keys(other))",
        "new": "(_keys(log) & _keys(other))",
        "tests": (_TESTS + "test_logs_of_the_same_pairs_are_not_disjoint",),
        "why": "two releases from one log would cost what the larger one does",
    },
    {
        "name": "disjoint_logs_take_the_smallest_delta",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "*(max(numbers) for numbers in zip(*found)),",
        "new": "min(each[0] for each in found),\n"
        "        *(max(numbers) for numbers in [*zip(*found)][1:]),",
        "tests": (
            _TESTS + "test_disjoint_logs_cost_the_largest_and_users_are_in_all_logs"
            "_of_time",
        ),
        "why": "each log holds at its own delta only",
    },
    {
        "name": "budget_refuses_what_was_spent_before_only",
        "kind": "composition",
        "file": _FILE,
        "old": (
            "total = compose(every, one_log=True)\n    if total.epsilon_pld <= budget:"
        ),
        "new": (
            "total = compose(released or planned, one_log=True)\n"
            "    if total.epsilon_pld <= budget:"
        ),
        "tests": (
            _TESTS
            + "test_a_run_is_refused_exactly_where_the_total_would_exceed_the_budget",
        ),
        "why": "the run that exceeds the budget is the one that is let through",
    },
    {
        "name": "a_job_is_paid_before_its_reranking_is_refused",
        "kind": "composition",
        "file": "tfdpsq/run/core/pipeline_checks.py",
        "old": "        reranking.check(own)\n",
        "new": "",
        "tests": (
            "tests/run/test_pipeline.py::test_bad_settings_end_before_any_stage",
        ),
        "why": "a corrected job pays for all generators again",
    },
    {
        "name": "forgotten_workdir_goes_on",
        "kind": "keys",
        "file": "tfdpsq/run/core/releases.py",
        "old": "        forgotten = (private / layout.FORGOTTEN).exists()\n",
        "new": "        forgotten = (private / layout.FORGOTTEN).is_dir()\n",
        "tests": (
            _FORGET + "test_a_workdir_forgotten_by_half_takes_no_stage_and_is_finished",
        ),
        "why": "a new key gives the same pairs another fingerprint than before",
    },
    {
        "name": "limit_takes_an_earlier_release_for_the_run_of_its_name",
        "kind": "composition",
        "file": _FILE,
        "old": "        while name in every:",
        "new": "        while name in released and not every:",
        "tests": (_TESTS + "test_an_earlier_release_may_have_the_name_of_the_run",),
        "why": "the run that is about to begin would not be counted",
    },
    {
        "name": "budget_takes_an_open_choice_for_a_covered_one",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/certified.py",
        "old": "open_choice=selection.choice_epsilon is None,",
        "new": "open_choice=selection.choice_epsilon is False,",
        "tests": (_TESTS + "test_a_choice_without_noise_is_told_with_every_total",),
        "why": "queries held out to choose without noise have no guarantee at all",
    },
    {
        "name": "ledger_kept_though_nothing_is_paid",
        "kind": "ledger",
        "file": "tfdpsq/privacy/proof/ledger.py",
        "old": "            elif summary.head != head:\n",
        "new": "            elif summary.plan != plan_fingerprint:\n",
        "tests": (
            "tests/privacy/test_ledger.py::"
            "test_a_ledger_without_paid_steps_is_begun_again_and_no_copy_has_its_head",
        ),
        "why": "two runs from a copied directory have one head, and count once",
    },
    {
        "name": "ledger_behind_its_state_begun_again",
        "kind": "ledger",
        "file": "tfdpsq/privacy/proof/ledger.py",
        "old": "            if summary.steps_paid < steps_taken:\n",
        "new": "            if summary.steps_paid < 0:\n",
        "tests": (
            "tests/privacy/test_ledger.py::"
            "test_a_ledger_behind_a_saved_state_is_damaged_and_kept",
        ),
        "why": "a run that lost its ledger spends its budget again, uncounted",
    },
    {
        "name": "seeds_kept_though_nothing_is_paid",
        "kind": "keys",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "    if not steps_paid:\n        path.parent",
        "new": "    if not steps_paid and not path.is_file():\n        path.parent",
        "tests": (
            "tests/privacy/test_paid_steps.py::"
            "test_copies_of_a_run_that_paid_nothing_share_nothing",
        ),
        "why": "two releases have the same noise, which their difference reveals",
    },
    {
        "name": "run_directory_not_locked",
        "kind": "resumes",
        "file": "tfdpsq/run/training/private_training.py",
        "old": "    with locked(directory):\n        checkpoint",
        "new": "    with contextlib.nullcontext():\n        checkpoint",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_a_second_process_is_refused_before_it_reads_or_deletes_anything",
        ),
        "why": "a second process deletes the seeds of steps that the first one pays",
    },
    {
        "name": "run_of_another_output_closed",
        "kind": "resumes",
        "file": "tfdpsq/run/training/private_training.py",
        "old": "        if _is_of(directory, output):\n",
        "new": "        if directory.is_dir():\n",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_a_run_belongs_to_the_output_that_paid_for_it",
        ),
        "why": "steps that a killed run paid for can never be finished",
    },
    {
        "name": "one_head_with_two_trainings_counted_once",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "            if digest != before_digest:\n",
        "new": "            if name == before_name and digest != before_digest:\n",
        "tests": (
            "tests/privacy/test_budget.py::"
            "test_one_head_with_two_trainings_is_not_one_run",
        ),
        "why": "two releases from a copied ledger cost as much as one",
    },
    {
        "name": "disjoint_logs_of_the_smallest_delta",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "*(max(numbers) for numbers in zip(*found)),",
        "new": "*(max(numbers) for numbers in [*zip(*found)][:4]),\n"
        "        min(each[4] for each in found),\n"
        "        *(max(numbers) for numbers in [*zip(*found)][5:]),",
        "tests": (
            _TESTS
            + "test_disjoint_logs_cost_the_largest_and_users_are_in_all_logs_of_time",
        ),
        "why": "the sum of epsilons is stated at a delta that it does not hold at",
    },
    {
        "name": "disjoint_logs_of_the_smallest_epsilon_by_rdp",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "delta, pld, rdp, *_summed(parts), runs",
        "new": "delta, pld, -rdp, *_summed(parts), runs",
        "tests": (
            _TESTS
            + "test_disjoint_logs_cost_the_largest_and_users_are_in_all_logs_of_time",
        ),
        "why": "a unit of the other log is less protected than is said",
    },
    {
        "name": "direct_training_outside_the_budget",
        "kind": "composition",
        "file": "tfdpsq/run/training/direct_training.py",
        "old": """\
    if devices.chief and not canary_set.holds_canaries(config.pairs):
        own, pairs = {context.run_dir.name: plan}, context.inputs["pairs"]
        spending.require_within(own, pairs, continuation=continuation)
""",
        "new": "",
        "tests": (
            "tests/run/test_budget.py::"
            "test_direct_training_is_refused_before_it_reads_its_pairs",
        ),
        "why": "--budget of train_retriever does nothing",
    },
    {
        "name": "points_on_splits_of_their_own",
        "kind": "composition",
        "file": "tfdpsq/run/training/choice_points.py",
        "old": '    "pairs split epsilon',
        "new": '    "pairs epsilon',
        "tests": (
            "tests/run/test_choose_inside.py::"
            "test_no_point_has_pairs_units_or_a_guarantee_of_its_own",
        ),
        "why": "points are planned for the units of one split and trained on others",
    },
    {
        "name": "grid_outside_the_budget",
        "kind": "composition",
        "file": "tfdpsq/run/choose.py",
        "old": "            self._require_within_budget(points, train)\n",
        "new": "            pass\n",
        "tests": (
            "tests/run/test_choose_inside.py::"
            "test_a_grid_above_the_limit_trains_no_point",
        ),
        "why": "--budget of choose does nothing until a point's own check",
    },
    {
        "name": "draw_among_points_outside_the_budget",
        "kind": "composition",
        "file": "tfdpsq/run/choose.py",
        "old": """\
            self._choice_epsilon if self._config.choice == "accounted" else None,
""",
        "new": "            None,\n",
        "tests": (
            "tests/run/test_choose_inside.py::"
            "test_a_grid_above_the_limit_trains_no_point",
        ),
        "why": "the choice is paid for by the held-out queries, and not counted",
    },
    {
        "name": "certificate_of_a_set_not_compared_with_its_manifest",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate_files.py",
        "old": "        digest = digest_in(marked)\n",
        "new": "        digest = stated(marked, MARK)\n",
        "tests": (
            "tests/run/test_budget.py::test_a_set_whose_certificate_was_lost_is_named",
        ),
        "why": "a set passes for public without it, or for that of a cheaper run",
    },
    {
        "name": "choices_among_the_same_runs_counted_once",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "if release.choice_epsilon is None and set(",
        "new": "if set(",
        "tests": (
            "tests/privacy/test_budget.py::test_basic_composition_counts_every_private_choice",
        ),
        "why": "who was held out pays for one choice of two",
    },
    {
        "name": "delta_above_what_is_stated",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "if delta > sum(deltas):",
        "new": "if False:",
        "tests": (
            "tests/privacy/test_budget.py::test_a_delta_above_what_releases_state_is_refused",
        ),
        "why": "a larger delta makes epsilon look smaller than any certificate says",
    },
    {
        "name": "nameless_only_if_all_runs_are",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/certified.py",
        "old": "nameless=not all(",
        "new": "nameless=not any(",
        "tests": (
            "tests/privacy/test_budget.py::test_a_selection_is_nameless_if_one_of_its_runs_is",
        ),
        "why": "two selections of the same settings pass for copies of one",
    },
    {
        "name": "selection_that_shares_a_run_costs_nothing",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "set(release.runs) <= seen:",
        "new": "set(release.runs) & seen:",
        "tests": (
            "tests/privacy/test_budget.py::test_selections_that_share_a_run_cost_what_either_has_alone",
        ),
        "why": "the runs that only the second release has are left out of the sum",
    },
    {
        "name": "ledger_locked_where_nobody_looks",
        "kind": "ledger",
        "file": "tfdpsq/privacy/proof/append_only.py",
        "old": "    if not _is_at(path, descriptor):\n"
        '        raise InputError(f"{path}: was replaced',
        "new": '    if False:\n        raise InputError(f"{path}: was replaced',
        "tests": (
            "tests/privacy/test_append_only.py::test_a_ledger_replaced_before_it_was_locked_is_not_used[1]",
        ),
        "why": "two runs pay for the same steps in two files, of which one has no name",
    },
    {
        "name": "failed_call_counts_as_its_first_step",
        "kind": "ledger",
        "file": "tfdpsq/privacy/loop.py",
        "old": 'f"Count {now.stop} steps of this run',
        "new": 'f"Count {now.start} steps of this run',
        "tests": (
            "tests/privacy/test_before_spending.py::test_a_call_of_several_steps_that_fails_counts_them_all",
        ),
        "why": "steps that moved the weights are said to have cost nothing",
    },
    {
        "name": "nameless_copies_counted_once",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": (
            "        composition.require_one_run(release, places)\n"
            "        releases_there"
        ),
        "new": "        releases_there",
        "tests": (
            "tests/run/test_budget.py::test_two_certificates_of_no_known_run_are_not_counted_as_one",
        ),
        "why": "two runs of one plan cannot be told from copies",
    },
    {
        "name": "noise_alone_is_paid_for",
        "kind": "ledger",
        "file": "tfdpsq/privacy/trials.py",
        "old": "if not norm and not _is_reached(setup, batch):",
        "new": "if False:",
        "tests": (
            "tests/privacy/test_before_spending.py::test_a_loss_that_trains_nothing_costs_nothing",
        ),
        "why": "all of the budget for weights that no row moved",
    },
    {
        "name": "a_log_is_tried_when_a_step_is_paid",
        "kind": "ledger",
        "file": "tfdpsq/run/core/progress.py",
        "old": (
            "        point_log.require_writable("
            "directory, point_log.FILE_NAME, layout.CURVE_FILE)\n"
        ),
        "new": "",
        "tests": (
            "tests/run/test_progress.py::test_a_place_is_tried_before_the_first_step",
        ),
        "why": "a run ends after its budget, and so does every restart",
    },
    {
        "name": "keras_arguments_are_ignored",
        "kind": "ledger",
        "file": "tfdpsq/privacy/fit_inputs.py",
        "old": "    for name in of_keras:\n",
        "new": "    for name in ():\n",
        "tests": (
            "tests/privacy/test_fit_inputs.py::test_what_fit_cannot_take_is_named",
        ),
        "why": "sample weights that the user gave did not act, and the budget is spent",
    },
    {
        "name": "another_vocabulary_is_paid_for",
        "kind": "ledger",
        "file": "tfdpsq/run/training/starting_model.py",
        "old": (
            '    sources.require_own_vocabulary("vocabulary", given, tokenizer, '
            "config.init)\n"
        ),
        "new": "",
        "tests": (
            "tests/run/test_finetune_options.py::test_settings_that_cannot_be_are_refused",
        ),
        "why": "all of the budget for weights whose words mean others",
    },
    {
        "name": "logs_of_one_name_replace_each_other",
        "kind": "composition",
        "file": "tfdpsq/run/budget.py",
        "old": "if label in composed:",
        "new": "if False:",
        "tests": (
            "tests/run/test_budget.py::test_a_log_with_units_of_two_kinds_has_no_total",
        ),
        "why": "a total leaves out what was released with units of another kind",
    },
)
