"""Mistakes in what a run that starts from released weights costs with earlier ones."""

_CONTINUATION = "tfdpsq/privacy/proof/continuation.py"
_COMPOSITION = "tfdpsq/privacy/proof/composition.py"
_CONTINUING = "tfdpsq/run/training/continuing.py"
_PROOF = "tests/privacy/test_continuation.py::"
_STAGE = "tests/run/test_continuing.py::"
_REFUSED = _PROOF + "test_what_cannot_be_continued_is_refused"
_TOTAL = "test_one_log_costs_the_composition_and_disjoint_logs_the_larger"
_THREE = _PROOF + "test_of_three_runs_those_compose_that_one_unit_can_be_in"
_FORGED = _PROOF + "test_a_forged_relation_or_parent_is_found"
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
        "if self.disjoint and (self.pairs is None or None in earlier_pairs):",
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
        _PROOF + "test_a_budget_counts_all_planned_steps_of_a_parent",
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
        "    disjoint = None if config.continues == COMPOSED else config.continues\n",
        '    disjoint = "time"\n',
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
        _PROOF + "test_the_sets_that_compose_are_all_maximal_ones",
        "runs that one unit had a part in are not composed",
    ),
)
