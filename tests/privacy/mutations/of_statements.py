"""Mistakes in what certificates state, and in what verification lets through."""

MUTATIONS = (
    {
        "name": "card_of_a_filtered_set_reads_nothing_private",
        "kind": "reads",
        "file": "tfdpsq/run/reporting/data_card.py",
        "old": '        provenance = provenance.get("of")\n',
        "new": "        provenance = None\n",
        "tests": (
            "tests/run/test_convert_out.py::"
            "test_a_card_tells_which_private_reads_made_the_set",
        ),
        "why": "the card says that no private query had a part, where one chose rows",
    },
    {
        "name": "verify_takes_the_certificate_of_another_artefact",
        "kind": "certificate",
        "file": "tfdpsq/run/verify.py",
        "old": "        problems += _problems_beside(folder)\n",
        "new": "        pass\n",
        "tests": (
            "tests/run/test_verify.py::"
            "test_the_certificate_of_another_artefact_exits_with_1",
        ),
        "why": "a model is shown with the certificate of one that cost less",
    },
    {
        "name": "verify_takes_an_epsilon_that_is_one_percent_low",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "_EPSILON_TOLERANCE = 1e-6\n",
        "new": "_EPSILON_TOLERANCE = 1e-2\n",
        "tests": (
            "tests/privacy/test_verification.py::"
            "test_every_edit_of_any_entry_is_found_and_nearly_all_without_the_digest",
        ),
        "why": "a stated epsilon that is too low still verifies",
    },
    {
        "name": "verify_takes_a_larger_maximum_batch",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "if plan.max_batch_size != chosen:",
        "new": "if plan.max_batch_size < chosen:",
        "tests": (
            "tests/privacy/test_verification.py::"
            "test_every_edit_of_any_entry_is_found_and_nearly_all_without_the_digest",
        ),
        "why": "the stated maximum is not the one that draws were truncated at",
    },
    {
        "name": "verify_takes_a_smaller_maximum_batch",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "if plan.max_batch_size != chosen:",
        "new": "if plan.max_batch_size > chosen:",
        "tests": (
            "tests/privacy/test_verification.py::"
            "test_every_edit_of_any_entry_is_found_and_nearly_all_without_the_digest",
        ),
        "why": "the stated maximum is not the one that draws were truncated at",
    },
    {
        "name": "verify_does_not_compare_with_the_target",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "if planned > plan.spec.epsilon * (1 + _EPSILON_TOLERANCE):",
        "new": "if planned > LARGEST_EPSILON:",
        "tests": (
            "tests/privacy/test_forgeries.py::"
            "test_forgeries_with_a_new_digest_are_found",
        ),
        "why": (
            "a plan that overspends its own target verifies if it was stopped early"
        ),
    },
    {
        "name": "selection_that_left_a_run_out_verifies",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "target * _LEAST_SPENT <= spent <= target",
        "new": "0 <= spent <= target",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_a_run_left_out_with_its_share_of_delta_shows_in_what_was_spent",
        ),
        "why": "a run that had a part in the choice is not counted",
    },
    {
        "name": "selection_that_added_a_run_verifies",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": ("target * _LEAST_SPENT <= spent <= target * (1 + _EPSILON_TOLERANCE)"),
        "new": "target * _LEAST_SPENT <= spent",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_forgeries_with_a_new_digest_are_found",
        ),
        "why": "runs that were not planned together verify as if they were",
    },
    {
        "name": "verify_takes_higher_epsilons_of_this_accountant",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "more = tolerance if same else _OTHER_VERSION_TOLERANCE",
        "new": "more = _OTHER_VERSION_TOLERANCE",
        "tests": (
            "tests/privacy/test_verification.py::"
            "test_a_higher_epsilon_is_taken_from_an_older_accountant_only",
        ),
        "why": "an epsilon that this accountant never computed verifies",
    },
    {
        "name": "verify_takes_lower_epsilons_of_another_accountant",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "least = expected * (1 - tolerance)",
        "new": "least = expected * (1 - more)",
        "tests": (
            "tests/privacy/test_verification.py::"
            "test_a_higher_epsilon_is_taken_from_an_older_accountant_only",
        ),
        "why": (
            "a file that states another version may understate epsilon by one percent"
        ),
    },
    {
        "name": "ledger_of_any_run_passes_for_a_selection",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "found = [run for run in runs if run.ledger_head == ledger.head]",
        "new": "found = list(runs)",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_a_ledger_is_compared_with_the_run_it_is_of",
        ),
        "why": "a ledger of something else passes for that of one of the runs",
    },
    {
        "name": "dotted_entry_stands_in_for_a_nested_one",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": 'key = str(key).replace(".", "\\\\.")',
        "new": "key = str(key)",
        "tests": (
            "tests/privacy/test_forgeries.py::"
            "test_a_true_value_beside_a_false_one_does_not_cover_it",
        ),
        "why": (
            "readers see a false entry, and verify compares a true one of the same path"
        ),
    },
    {
        "name": "words_from_before_taken_of_a_secure_run",
        "kind": "secure",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "if not plan.spec.secure:\n        expected = certificate_random",
        "new": "if True:\n        expected = certificate_random",
        "tests": (
            "tests/privacy/test_forgeries.py::"
            "test_a_secure_run_was_never_certified_without_its_randomness",
        ),
        "why": (
            "what the noise was drawn with can be struck out of a secure certificate"
        ),
    },
    {
        "name": "selected_run_may_be_unfinished",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certified.py",
        "old": "if steps != plan.spec.steps:",
        "new": "if steps > plan.spec.steps:",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_forgeries_with_a_new_digest_are_found",
        ),
        "why": ("runs are counted by fewer steps than they were planned and paid for"),
    },
    {
        "name": "selections_ledger_head_not_the_chosen_runs",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": 'if certificate.get("ledger_head") != head:',
        "new": 'if certificate.get("ledger_head") is None:',
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_forgeries_with_a_new_digest_are_found",
        ),
        "why": "the certificate points at the ledger of another run",
    },
    {
        "name": "shuffled_adjacency_called_add_or_remove",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": '"adjacency": _ADJACENCY[spec.sampler],',
        "new": '"adjacency": _ADJACENCY["poisson"],',
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_shuffled_batches_are_labelled_and_claim_no_amplification",
        ),
        "why": "a zero-out guarantee passes for one of adding or removing",
    },
    {
        "name": "shuffled_certificate_states_a_probability",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": "None if shuffled else plan.sampling_probability",
        "new": "plan.sampling_probability",
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_shuffled_batches_are_labelled_and_claim_no_amplification",
        ),
        "why": "readers amplify by a probability that no unit was drawn with",
    },
    {
        "name": "early_stop_not_warned_of",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": "if plan.spec.private and steps_executed < plan.spec.steps:",
        "new": "if plan.spec.private and steps_executed > plan.spec.steps:",
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_epsilon_is_of_the_steps_that_ran_and_stopping_early_is_warned_of",
        ),
        "why": (
            "epsilon of the steps that ran is taken for one that covers the "
            "choice to stop"
        ),
    },
    {
        "name": "two_runs_of_one_epsilon_taken_for_one",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": "if any(certificate != present[0] for certificate in present):",
        "new": 'if len({c["guarantee"]["epsilon"] for c in present}) > 1:',
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_guarantees_follow_and_do_not_merge",
        ),
        "why": (
            "two artefacts' epsilons are not added up where they happen to be equal"
        ),
    },
    {
        "name": "exact_number_of_units_called_a_bound",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": ('        if spec.n_is_public\n        else "The upper bound'),
        "new": ('        if not spec.n_is_public\n        else "The upper bound'),
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_the_number_of_units_is_said_to_be_protected_unless_it_was_declared",
        ),
        "why": "a number that was published is said to be protected",
    },
    {
        "name": "steps_counted_as_releases_of_shuffled_batches",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": '"releases_counted": plan.releases(steps_executed)[1],',
        "new": '"releases_counted": steps_executed,',
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_shuffled_batches_are_labelled_and_claim_no_amplification",
        ),
        "why": "what epsilon counts is stated wrongly",
    },
    {
        "name": "certificate_that_says_a_thing_twice_is_read",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": "if len(found) < len(pairs):",
        "new": "if len(found) > len(pairs):",
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_files_that_are_no_certificates_are_refused",
        ),
        "why": "two readers of one file believe different epsilons",
    },
    {
        "name": "one_releases_interval_stated_for_all_runs",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": (
            "return min(accounting.pld_interval(plan.noise_multiplier) for "
            "plan in plans)"
        ),
        "new": "return accounting.pld_interval(plans[0].noise_multiplier)",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_the_grid_of_all_runs_is_the_finest_that_one_of_them_needs",
        ),
        "why": "the stated grid is not the one that epsilon was computed on",
    },
    {
        "name": "delta_of_one_run_for_all_of_a_selection",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": "delta = self.delta if spec.private else spec.delta",
        "new": "delta = spec.delta",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_a_query_has_the_larger_epsilon_of_training_and_choice",
        ),
        "why": "delta is too low by the number of runs",
    },
    {
        "name": "epsilon_of_the_choice_forgotten",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": ("return max(self.epsilon_of_training(), self.choice_epsilon or 0.0)"),
        "new": "return self.epsilon_of_training()",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_a_query_has_the_larger_epsilon_of_training_and_choice",
        ),
        "why": "a query that chose has a larger epsilon than what is stated",
    },
    {
        "name": "runs_over_the_target_get_a_certificate",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": "if spent > selection.target_epsilon:",
        "new": "if spent > 1.2 * selection.target_epsilon:",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_runs_that_were_not_planned_together_get_no_certificate",
        ),
        "why": "runs that overspent together are certified",
    },
    {
        "name": "diverged_run_counted_as_a_candidate",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": ("if self.chosen not in self.runs or self.runs[self.chosen].diverged:"),
        "new": "if self.chosen not in self.runs:",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_forgeries_with_a_new_digest_are_found",
        ),
        "why": "the certificate names a run that could not be chosen",
    },
    {
        "name": "later_parents_guarantee_forgotten",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": "present = [dict(c) for c in certificates if c is not None]",
        "new": "present = [dict(c) for c in certificates[:1] if c is not None]",
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_guarantees_follow_and_do_not_merge",
        ),
        "why": ("what was made from public data and private weights passes for public"),
    },
    {
        "name": "several_units_at_the_same_delta",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate_words.py",
        "old": "    return _SEVERAL[unit]",
        "new": "    return _BEFORE[unit]",
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_what_it_says_of_several_units_is_true_of_gaussian_noise",
        ),
        "why": (
            "ten queries of one person are said to have ten times epsilon, and "
            "have far more"
        ),
    },
    {
        "name": "pairs_in_the_words_of_queries",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": '"unit_in_words": _UNIT_IN_WORDS[spec.unit],',
        "new": '"unit_in_words": _UNIT_IN_WORDS[spec.unit.replace("pair", "query")],',
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_pairs_are_named_as_what_is_protected_and_queries_as_what_is_not",
        ),
        "why": "a guarantee for pairs is stated as one for queries, which is stronger",
    },
    {
        "name": "pairs_of_a_query_called_covered",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate_words.py",
        "old": "    return _SEVERAL[unit]",
        "new": '    return _SEVERAL["query" if unit == "pair" else unit]',
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_pairs_are_named_as_what_is_protected_and_queries_as_what_is_not",
        ),
        "why": "that a query with several documents is several units goes unsaid",
    },
    {
        "name": "queries_with_all_their_pairs",
        "kind": "clipping",
        "file": "tfdpsq/run/core/sources.py",
        "old": 'beir.all_pairs(split) if unit == "pair" else beir.pairs(split)',
        "new": 'beir.all_pairs(split) if unit != "user" else beir.pairs(split)',
        "tests": (
            "tests/run/test_pair_unit.py::"
            "test_a_neighbour_moves_the_clipped_sum_by_what_its_unit_states",
        ),
        "why": "a query of k documents moves the sum by k clip norms; one is stated",
    },
    {
        "name": "negatives_of_a_pair_read_the_querys_other_pairs",
        "kind": "negatives",
        "file": "tfdpsq/run/training/hard_negatives.py",
        "old": 'if unit == "pair" and run:',
        "new": "if False:",
        "tests": (
            "tests/run/test_pair_unit.py::"
            "test_negatives_that_read_other_pairs_are_refused_for_pairs",
        ),
        "why": "a pair less changes the rows of the query's other pairs as well",
    },
    {
        "name": "training_documents_shown_undeclared",
        "kind": "reads",
        "file": "tfdpsq/run/passes/corpus_shards.py",
        "old": "and not config.training_documents_are_public:",
        "new": "and config.training_documents_are_public is None:",
        "tests": (
            "tests/run/test_training_documents.py::"
            "test_undeclared_documents_are_refused_before_anything_is_read",
        ),
        "why": "which documents have private queries shows, and was not declared",
    },
    {
        "name": "older_words_taken_for_any",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate_words.py",
        "old": 'return {**computed, "not_covered": lines}',
        "new": 'return {**computed, "not_covered": said or lines}',
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_a_certificate_in_the_words_before_holds_and_no_others",
        ),
        "why": "what is not covered can be struck out",
    },
    {
        "name": "withdrawn_sentence_taken_from_today",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate_words.py",
        "old": '    if computed.get("randomness.key_bits.noise") == 128:\n',
        "new": "    if False:\n",
        "tests": (
            "tests/privacy/test_verification.py::test_a_new_certificate_with_a_withdrawn_sentence_is_refused_or_warned_of",
        ),
        "why": "a new certificate promises k times epsilon for k queries, and verifies",
    },
    {
        "name": "withdrawn_sentence_not_warned_of",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": "in certificate_words.warnings_of(each)",
        "new": "in ()",
        "tests": (
            "tests/privacy/test_older_certificates.py::test_it_holds_with_its_ledgers_and_the_same_epsilon[generator_pld]",
        ),
        "why": "readers of an older certificate believe what was found to be false",
    },
    {
        "name": "results_call_a_generator_that_reranks_public",
        "kind": "certificate",
        "file": "tfdpsq/results.py",
        "old": "        if system.startswith(_RERANKED):  # by a gen",
        "new": "        if system.startswith(_RERANKED):\n            return 0.0\n"
        "        if system.startswith(_RERANKED):  # by a gen",
        "tests": ("tests/test_results.py::test_tables_hold_what_the_files_do",),
        "why": "a row of epsilon 8, or of none, is said to have read nothing private",
    },
    {
        "name": "report_promises_queries_what_pairs_have",
        "kind": "certificate",
        "file": "tfdpsq/run/reporting/certificates_in_words.py",
        "old": "    if len(units) > 1:\n",
        "new": '    if units:\n        return _UNITS["query"]\n    if units:\n',
        "tests": (
            "tests/run/test_report.py::test_the_top_names_the_unit_of_the_certificates",
        ),
        "why": "a query with k documents has k times the epsilon that the page states",
    },
    {
        "name": "products_of_any_engine_called_exact",
        "kind": "certificate",
        "file": "tfdpsq/run/training/private_training.py",
        "old": ('        if config.engine == "fast"\n        else "as in'),
        "new": ('        if config.engine\n        else "as in'),
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_only_the_own_engine_is_said_to_bound_rounding",
        ),
        "why": "a certificate promises bounds that tensorflow-privacy does not have",
    },
    {
        "name": "certificate_of_a_fit_that_was_stopped",
        "kind": "certificate",
        "file": "tfdpsq/privacy/model.py",
        "old": "        if self.steps_executed != spec.steps:\n",
        "new": "        if not self.steps_executed:\n",
        "tests": (
            "tests/privacy/test_model_certificate.py::"
            "test_a_plan_that_did_not_end_has_none",
        ),
        "why": "when a callback stopped training tells of what it looked at",
    },
    {
        "name": "usual_argument_for_any_sensitivity",
        "kind": "certificate",
        "file": "tfdpsq/privacy/model.py",
        "old": "            if multiplier != 1:\n",
        "new": "            if multiplier < 1:\n",
        "tests": (
            "tests/privacy/test_model_certificate.py::"
            "test_an_argument_of_ones_own_is_stated_and_needed_where_the_usual_does_"
            "not_hold",
        ),
        "why": "it would say that rows read no other row where they do",
    },
    {
        "name": "reads_of_a_killed_fit_forgotten",
        "kind": "reads",
        "file": "tfdpsq/privacy/model.py",
        "old": "private_reads.PrivateReads(path, self.reads.strict)",
        "new": "private_reads.PrivateReads(None, self.reads.strict)",
        "tests": (
            "tests/privacy/test_model_certificate.py::"
            "test_it_lists_the_reads_of_a_process_that_was_killed",
        ),
        "why": "the certificate would leave out what the first process showed",
    },
    {
        "name": "reads_before_a_directory_forgotten",
        "kind": "reads",
        "file": "tfdpsq/privacy/model.py",
        "old": (
            "            for entry in before:\n"
            "                self.reads.record(**entry)\n"
        ),
        "new": "            del before\n",
        "tests": (
            "tests/privacy/test_model_certificate.py::test_reads_that_the_caller_recorded_before_are_listed",
        ),
        "why": "the certificate would leave out what the caller recorded",
    },
    {
        "name": "a_path_without_its_ledger_pays_again",
        "kind": "ledger",
        "file": "tfdpsq/privacy/model.py",
        "old": "directory == self._directory and head == self._ledger_head",
        "new": "directory == self._directory",
        "tests": (
            "tests/privacy/test_model_certificate.py::test_a_path_whose_ledger_is_gone_does_not_pay_a_second_run",
        ),
        "why": "the runs before the ledger was lost are counted by nothing",
    },
)
