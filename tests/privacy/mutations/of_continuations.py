"""Mistakes in what a run that starts from released weights costs with earlier ones."""

_CONTINUATION = "tfdpsq/privacy/proof/continuation.py"
_COMPOSITION = "tfdpsq/privacy/proof/composition.py"
_CONTINUING = "tfdpsq/run/training/continuing.py"
_PROOF = "tests/privacy/test_continuation.py::"
_TOTALS = "tests/privacy/test_continued_totals.py::"
_STAGE = "tests/run/test_continuing.py::"
_REFUSED = _PROOF + "test_what_cannot_be_continued_is_refused"
_TOTAL = "test_one_log_costs_the_composition_and_disjoint_logs_the_larger"
_THREE = _PROOF + "test_of_three_runs_those_compose_that_one_unit_can_be_in"
_FORGED = _PROOF + "test_a_forged_relation_or_parent_is_found"
_BUDGET = "tests/privacy/test_budget.py::"
_MONTH = _STAGE + "test_a_month_later_the_total_is_stated_verified_and_budgeted"


def _mistake(name, file, old, new, test, why, kind="composition"):
    return {
        "name": name,
        "kind": kind,
        "file": file,
        "old": old,
        "new": new,
        "tests": (test,),
        "why": why,
    }


MUTATIONS = (
    _mistake(
        "continuation_costs_its_own_run_only",
        _CONTINUATION,
        "            before=self.earlier.each,\n",
        "",
        _PROOF + _TOTAL,
        "the certificate of the second month forgets the first",
    ),
    _mistake(
        "continuation_of_the_last_run_only",
        _CONTINUATION,
        "            before=self.earlier.each,\n",
        "            before=self.earlier.each[-1:],\n",
        _THREE,
        "the certificate of the third month forgets the first",
    ),
    _mistake(
        "logs_are_apart_without_a_declaration",
        _CONTINUATION,
        "if not self.disjoint or not self._separates:",
        "if not self._separates:",
        _PROOF + _TOTAL,
        "runs on one log state the larger epsilon of the two",
    ),
    _mistake(
        "users_are_apart_by_time",
        _CONTINUATION,
        "if not self.disjoint or not self._separates:",
        "if not self.disjoint:",
        _PROOF + "test_a_user_is_in_all_logs_of_time_but_in_one_log_of_users",
        "a user with queries in every month is promised what one month costs",
    ),
    _mistake(
        "a_disjoint_log_may_be_the_earlier_one",
        _CONTINUATION,
        "if self.disjoint and self.pairs in earlier_pairs:",
        "if False:",
        _REFUSED,
        "the same pairs pass for a log that shares no query with itself",
    ),
    _mistake(
        "disjoint_logs_without_fingerprints",
        _CONTINUATION,
        "if self.disjoint and not all([self.pairs, *earlier_pairs]):",
        "if False:",
        _REFUSED,
        "a declaration about pairs that nobody can tell apart",
    ),
    _mistake(
        "unprotected_weights_are_continued",
        _CONTINUATION,
        'and self.parent.get("private") is True)',
        ")",
        _PROOF + "test_a_parent_without_privacy_has_no_total",
        "epsilon is stated for weights that private queries can be read from",
    ),
    _mistake(
        "a_continuation_mixes_units",
        _CONTINUATION,
        "        if problem:\n",
        "        if False:\n",
        _REFUSED,
        "a user is promised what the earlier run promised a query",
    ),
    _mistake(
        "one_ledger_for_both_runs",
        _CONTINUATION,
        "any(key in part.runs for part in self.earlier.each)",
        "False",
        _REFUSED,
        "two runs under one ledger head count as one",
    ),
    _mistake(
        "continuation_states_the_delta_of_its_run",
        _CONTINUATION,
        "        delta=total.delta,\n",
        '        delta=alone["delta"],\n',
        _PROOF + "test_delta_is_the_largest_of_disjoint_logs_and_the_smallest_of_one",
        "units of the earlier log are promised a delta that was never theirs",
    ),
    _mistake(
        "a_parent_is_believed",
        "tfdpsq/privacy/proof/verification.py",
        "        _require_parent(certificate)\n",
        "",
        _FORGED,
        "a parent whose epsilon was lowered makes both look cheap",
        "certificate",
    ),
    _mistake(
        "the_parent_counts_for_the_child",
        "tfdpsq/privacy/proof/certificate.py",
        "if digest_of(own) not in earlier]",
        "if digest_of(own) in earlier or not earlier]",
        _PROOF
        + "test_what_is_made_from_parent_and_child_has_the_guarantee_of_the_child",
        "what both months made carries the certificate of the first",
        "certificate",
    ),
    _mistake(
        "only_one_set_of_logs_counts",
        _COMPOSITION,
        "        yield [part for part in parts if leader[log_of(part)] in clique]\n",
        "        yield [part for part in parts if leader[log_of(part)] in clique]\n"
        "        return\n",
        _PROOF + _TOTAL,
        "units of the other logs have a larger epsilon than is stated",
    ),
    _mistake(
        "parents_of_a_release_are_free",
        _COMPOSITION,
        "for part in (part for release in releases for part in release.each):",
        "for part in releases:",
        _THREE,
        "a total of all releases leaves out what they started from",
    ),
    _mistake(
        "a_planned_run_forgets_what_it_continues",
        "tfdpsq/privacy/proof/budget.py",
        "    if continuation is not None:\n",
        "    if False:\n",
        _STAGE + "test_a_limit_counts_what_is_continued",
        "a run is allowed that exceeds the budget with the weights it starts from",
    ),
    _mistake(
        "parents_that_stopped_early_count_less_in_a_sum",
        _COMPOSITION,
        "    before = tuple(map(to_the_last_step, release.before))\n",
        "    before = release.before\n",
        _TOTALS + "test_a_budget_counts_all_planned_steps_of_a_parent",
        "what was stopped for what its weights showed leaves more of the budget",
    ),
    _mistake(
        "generators_start_from_private_weights_undeclared",
        "tfdpsq/run/finetune.py",
        "    continuing.require_continuable(config, parent)\n\n\nif",
        "    pass\n\n\nif",
        _STAGE + "test_what_cannot_be_continued_is_refused_before_payment",
        "the certificate is of the last run alone",
    ),
    _mistake(
        "the_declaration_is_not_taken_over",
        _CONTINUING,
        'disjoint = None if config.continues in ("", COMPOSED) else config.continues',
        'disjoint = "time"',
        _MONTH,
        "runs on one log state the larger epsilon of the two",
    ),
    _mistake(
        "the_certificate_is_of_the_last_run_alone",
        _CONTINUING,
        "    continuation = continuation_of(config, context, plan)\n"
        "    if continuation is None:\n",
        "    continuation = continuation_of(config, context, plan)\n    if True:\n",
        _MONTH,
        "who reads the second certificate does not learn of the first run",
    ),
    _mistake(
        "sets_of_logs_without_the_pivot_s_own",
        _COMPOSITION,
        "for log in sorted(left - shares[pivot]):",
        "for log in sorted(left & shares[pivot]):",
        _TOTALS + "test_the_sets_that_compose_are_all_maximal_ones",
        "runs that one unit had a part in are not composed",
    ),
    _mistake(
        "a_head_can_name_another_run",
        _COMPOSITION,
        'return f"ledger {head}" if head else f"run {otherwise}"',
        "return head or otherwise",
        _PROOF + "test_a_head_that_reads_like_another_run_s_name_is_another_run",
        "two runs under a forged name count as one",
    ),
    _mistake(
        "a_selection_brings_a_parent_along",
        "tfdpsq/privacy/proof/certified.py",
        'if "selection" in certificate and "continuation" in certificate:',
        "if False:",
        _PROOF + "test_a_selection_cannot_bring_a_parent_along",
        "a forged entry that nothing follows from verifies",
        "certificate",
    ),
    _mistake(
        "a_parent_by_its_stated_digest",
        "tfdpsq/privacy/proof/certificate.py",
        "earlier = {digest_of(parent) for own",
        'earlier = {parent.get("digest") for own',
        _PROOF + "test_a_selection_cannot_bring_a_parent_along",
        "a forged parent takes the place of the true one, whose epsilon is lost",
        "certificate",
    ),
    _mistake(
        "the_most_favourable_relation_of_two_logs",
        _COMPOSITION,
        "    edges -= {frozenset((log_of(p), other)) for p in parts for other in "
        "p.sharing_with}\n",
        "",
        _TOTALS + "test_two_relations_of_the_same_logs_count_as_one_log",
        "a total is below what one of its certificates states",
    ),
    _mistake(
        "one_run_with_two_relations",
        "tfdpsq/privacy/proof/certified.py",
        'entry_at(certificate, "continuation.disjoint"),\n        entry_at(',
        "None,\n        entry_at(",
        _TOTALS + "test_two_relations_of_the_same_logs_count_as_one_log",
        "a run that was certified twice counts as the cheaper one",
    ),
    _mistake(
        "warnings_of_earlier_runs_are_dropped",
        _CONTINUATION,
        "[*_warnings(continuation, total), *_earlier(continuation)]",
        "_warnings(continuation, total)",
        _PROOF + "test_what_earlier_certificates_warn_of_stands_in_the_last_one",
        "an epsilon that holds on a condition is stated without it",
        "certificate",
    ),
    _mistake(
        "reads_of_earlier_runs_are_dropped",
        _CONTINUATION,
        "[*private_reads, *_earlier_reads(continuation)]",
        "private_reads",
        _STAGE + "test_a_card_tells_the_reads_and_limits_of_every_run",
        "a released card says that nothing else was read",
        "reads",
    ),
    _mistake(
        "an_early_stop_falls_back_to_the_last_target",
        _CONTINUATION,
        "*_warnings(continuation, total), ",
        '*found["warnings"], ',
        _PROOF
        + "test_an_early_stop_is_warned_of_with_the_epsilon_of_all_planned_steps",
        "the fallback that is named is below the total itself",
        "certificate",
    ),
    _mistake(
        "a_grid_may_continue",
        "tfdpsq/run/training/choice_points.py",
        "        if stage.continues:\n",
        "        if False:\n",
        "tests/run/test_choose_inside.py::"
        "test_what_cannot_be_certified_is_refused_before_anything_is_paid",
        "points are paid for before one is refused",
        "ledger",
    ),
    _mistake(
        "an_audit_claims_the_epsilon_of_other_runs",
        "tfdpsq/run/attacks/audit_subject.py",
        "    if own and pairs[0] not in pairs[1:]:\n",
        "    if False:\n",
        _STAGE + "test_an_audit_compares_with_the_run_that_had_the_canaries",
        "a run that breaks its own promise passes by that of another",
    ),
    _mistake(
        "a_retriever_reads_before_it_is_refused",
        "tfdpsq/run/train_retriever.py",
        """\
        plan = None
        if config.method != "plain":
            units, plan = direct_training.planned(config, context, source)
        reads = private_training.record_losses(context.private, source, config.strict)
""",
        """\
        plan = None
        reads = private_training.record_losses(context.private, source, config.strict)
        if config.method != "plain":
            units, plan = direct_training.planned(config, context, source)
""",
        _STAGE + "test_a_refused_retriever_reads_nothing_private",
        "a read is on record that never was",
        "reads",
    ),
    {
        "name": "sets_of_logs_beyond_the_limit_left_out",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "groups = [list(parts)]  # which is an upper bound",
        "new": "groups = groups[:_MOST_GROUPS]",
        "tests": (
            "tests/privacy/test_continued_totals.py::test_of_too_many_sets_of_logs_the_bound_is_of_all_releases",
        ),
        "why": "one of those left out can be the dearest",
    },
    {
        "name": "a_parent_taken_without_recomputing_it",
        "kind": "composition",
        "file": "tfdpsq/run/training/continuing.py",
        "old": ('budget.release_of(parent, f"the certificate of {place}"),'),
        "new": "budget.release_in(parent),",
        "tests": (
            "tests/run/test_continuing.py::test_a_parent_whose_digest_was_made_anew_is_refused_before_spending",
        ),
        "why": "a forged parent makes room under the limit",
    },
    {
        "name": "a_large_delta_of_the_last_run_is_not_told",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/continuation.py",
        "old": "found = [spec.delta_warning] if spec.delta_warning else []",
        "new": "found: list[str] = []",
        "tests": (
            "tests/privacy/test_continuation.py::test_a_delta_that_is_large_for_the_log_is_warned_of",
        ),
        "why": "a delta above 1/(2n) is released without a word",
    },
    {
        "name": "a_large_delta_of_a_choice_is_not_told",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": "[whole.delta_warning] if whole.delta_warning else []",
        "new": "[]",
        "tests": (
            "tests/privacy/test_selection.py::test_a_delta_that_is_large_for_the_log_is_warned_of",
        ),
        "why": "a delta above 1/(2n) is released without a word",
    },
    {
        "name": "neighbours_of_the_last_runs_alone_are_compared",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "    parts = (*first.each, *other.each)\n",
        "new": "    parts = (first, other)\n",
        "tests": (_PROOF + "test_neighbours_are_those_of_all_runs",),
        "why": "what a chain of releases began with has other neighbours",
    },
    {
        "name": "a_choice_without_noise_composed_for_replaced_units",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "any(p.open_choice or p.choice_epsilon is not None for p in parts)",
        "new": "any(p.choice_epsilon is not None for p in parts)",
        "tests": (
            _BUDGET + "test_choices_and_groups_are_not_composed_with_replaced_units",
        ),
        "why": "a choice is derived for units that are added or removed alone",
    },
    {
        "name": "releases_that_fit_the_first_are_not_compared_with_each_other",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "        joined = as_one([joined, releases[name]])\n",
        "new": "",
        "tests": (
            _BUDGET + "test_choices_and_groups_are_not_composed_with_replaced_units",
        ),
        "why": "a Poisson release goes with either kind, and lets both in",
    },
    {
        "name": "a_window_longer_than_an_epoch_is_certified",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": '"noise_window": window.steps,',
        "new": '"noise_window": plan.spec.noise_window,',
        "tests": (
            "tests/privacy/test_correlation.py::"
            "test_certificates_say_what_cancels_and_verify",
        ),
        "why": "the certificate states a mechanism that did not run",
    },
    {
        "name": "the_number_of_units_called_protected_beside_shuffled_batches",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/continuation.py",
        "old": '        found["not_covered"][-1] = _NUMBER_OF_REPLACED\n',
        "new": "        pass\n",
        "tests": (_PROOF + "test_neighbours_are_those_of_all_runs",),
        "why": "neighbours that replace a unit have the same number of units",
    },
)
