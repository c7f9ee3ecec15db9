"""Mistakes in what counts of private queries release, and in who states their cost."""

_COUNTING = "tfdpsq/run/training/private_training.py"
_CONTINUING = "tfdpsq/run/training/continuing.py"
_BUDGET = "tfdpsq/privacy/proof/budget.py"
_SYNTHESIZE = "tfdpsq/run/synthesize.py"
_STAGE = "tests/run/test_histogram.py::"
_NOISE = _STAGE + "test_counts_are_those_of_the_log_with_the_stated_noise"
_UNIT = _STAGE + "test_one_unit_moves_the_counts_by_at_most_1"
_BOTH = _STAGE + "test_generator_and_set_state_the_epsilon_of_both"
_UNCOVERED = _STAGE + "test_what_no_epsilon_would_cover_is_refused"
_CANARIES = _STAGE + "test_counts_of_canaries_stay_private_with_all_that_follows"


MUTATIONS = (
    (
        "counts_are_normalised_by_their_private_number",
        "sampling",
        _COUNTING,
        "clip_norm=1.0, batch_size=n, steps=1",
        "clip_norm=1.0, batch_size=units.count, steps=1",
        _UNIT,
        "the certificate states how many private units there are",
    ),
    (
        "counts_with_the_noise_of_another_bound",
        "noise",
        _COUNTING,
        "clip_norm=1.0, batch_size=n, steps=1",
        "clip_norm=0.5, batch_size=n, steps=1",
        _NOISE,
        "counts of a half are released as if they were whole",
    ),
    (
        "a_generator_s_target_forgets_the_histogram",
        "composition",
        _BUDGET,
        'every = {**released, "planned": planned_release({"planned": plan}, "")}',
        'every = {"planned": planned_release({"planned": plan}, "")}',
        _BOTH,
        "counts and generator together spend more than epsilon",
    ),
    (
        "a_generator_s_certificate_forgets_the_histogram",
        "certificate",
        _CONTINUING,
        'parent, place = context.histogram, config.get("histogram")',
        'parent, place = None, ""',
        _BOTH,
        "the set is written by counts that no certificate has",
    ),
    (
        "a_histogram_takes_half_of_epsilon",
        "composition",
        _BUDGET,
        "LEAST_LEFT = 0.95",
        "LEAST_LEFT = 0.5",
        _UNCOVERED,
        "the limit of 5 % is not kept",
    ),
    (
        "a_histogram_beside_an_epsilon_that_does_not_count_it",
        "composition",
        _CONTINUING,
        "    if histogram and (config.continues or not",
        "    if histogram and (not",
        _UNCOVERED,
        "a run from released weights drops their certificate for the histogram's",
    ),
    (
        "a_set_by_counts_that_its_certificate_lacks",
        "composition",
        _SYNTHESIZE,
        "        return certificates.inherited_certificate(own, counted)\n",
        "        return own or counted\n",
        _UNCOVERED,
        "the set states the epsilon of the generator alone",
    ),
    (
        "a_choice_among_runs_that_each_count_a_histogram",
        "composition",
        "tfdpsq/run/training/choice_points.py",
        "        if stage.histogram:\n",
        "        if False:\n",
        _UNCOVERED,
        "the choice's certificate states nothing of the histogram",
    ),
    (
        "counts_of_canaries_are_certified",
        "release",
        "tfdpsq/run/histogram.py",
        'contexts.guarantee_of_training(config.pairs, "", None, True, True),',
        "releases.CERTIFIED,",
        _CANARIES,
        "what canaries had a part in may be released, as if they were queries",
    ),
    (
        "a_set_by_private_counts_is_released",
        "release",
        _SYNTHESIZE,
        "releases.guarantee_of(certificate, str(located), config.histogram),",
        "releases.guarantee_of(certificate, str(located)),",
        _CANARIES,
        "a set by counts of canaries lies under release/",
    ),
    (
        "any_words_that_begin_as_they_did_before",
        "certificate",
        "tfdpsq/privacy/proof/certificate_words.py",
        "before = str(computed[_IN_WORDS]).replace(CAME_AFTER, _STARTED_FROM)",
        "before = str(stated[_IN_WORDS])",
        "tests/privacy/test_continuation.py::"
        "test_earlier_words_on_what_was_released_before_still_verify",
        "what a certificate says of the runs together is not compared",
    ),
    (
        "other_counts_than_the_certificate_was_made_for",
        "certificate",
        "tfdpsq/run/passes/document_rates.py",
        'if stated.get("histogram") != fingerprint(path.parent):',
        "if False:",
        _STAGE + "test_a_histogram_of_other_documents_or_damaged_is_refused",
        "anybody's counts pass as the released ones",
    ),
)
