"""Mistakes in a choice among runs: what it costs, and which generator it releases."""

_CHOOSE = "tfdpsq/run/choose.py"
_INSIDE = "tests/run/test_choose_inside.py::"
_MAKE = "tests/run/test_choose_make.py::"
_COUNTED = _MAKE + "test_the_certificate_counts_all_runs_the_choice_and_the_reads"


def _mistake(name, kind, file, old, new, test, why):
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
        "a_choice_with_the_certificate_of_its_run",
        "certificate",
        _CHOOSE,
        "records.write_certificate(out, certificate)",
        'records.write_certificate(out, own[selection.chosen]["certificate"])',
        _COUNTED,
        "epsilon of one run is stated for one chosen among many",
    ),
    _mistake(
        "a_choice_without_its_reads",
        "reads",
        _CHOOSE,
        "records.all_private_reads(self._private),",
        "[],",
        _COUNTED,
        "the certificate hides what no epsilon covers",
    ),
    _mistake(
        "a_choice_without_reads_that_are_listed_deeper",
        "reads",
        _CHOOSE,
        "records.all_private_reads(self._private),",
        "records.private_reads(self._private, self._config.finetune.strict).entries,",
        _COUNTED,
        "the certificate hides reads of outputs below the private directory",
    ),
    _mistake(
        "a_draw_that_is_called_declared",
        "certificate",
        _CHOOSE,
        '            chosen["epsilon"],\n',
        "            None,\n",
        _COUNTED,
        "the epsilon of the draw is not stated, nor composed by budget",
    ),
    _mistake(
        "other_weights_than_those_chosen",
        "release",
        _CHOOSE,
        "self._point(selection.chosen).iterdir()",
        "self._point(points[0].name).iterdir()",
        _MAKE + "test_the_weights_are_those_that_the_certificate_names",
        "a second run's weights are released under the certificate of the first's",
    ),
    _mistake(
        "a_choice_among_runs_of_which_none_diverged",
        "composition",
        _CHOOSE,
        'own[point.name]["diverged"],\n            )',
        "False,\n            )",
        _COUNTED,
        "the certificate counts candidates that could not be chosen",
    ),
    _mistake(
        "a_declared_choice_of_the_lowest_score",
        "certificate",
        _CHOOSE,
        'max(names, key=lambda name: scores[name]["bleu"])',
        'min(names, key=lambda name: scores[name]["bleu"])',
        _INSIDE + "test_a_declared_choice_is_the_highest_of_the_scores",
        "the certificate says that the highest score was taken",
    ),
    _mistake(
        "a_pair_in_both_splits_of_a_choice",
        "composition",
        _CHOOSE,
        "        if both:\n",
        '        if both and shared.unit != "pair":\n',
        _INSIDE + "test_a_query_in_both_splits_is_refused",
        "a pair has a part in training and in the choice, and pays for one of them",
    ),
    _mistake(
        "a_choice_by_queries_without_the_prompt",
        "sampling",
        _CHOOSE,
        '        prompt=trained["prompt"],\n',
        "",
        _MAKE + "test_a_point_writes_with_the_prompt_it_was_trained_with",
        "what is scored is not what the generator writes",
    ),
    _mistake(
        "a_paid_grid_goes_on_with_other_samples",
        "composition",
        "tfdpsq/run/training/choice_points.py",
        '"synthesize": {**writing, "batch_size": None}',
        '"synthesize": None',
        _INSIDE + "test_a_grid_that_paid_for_a_step_is_not_begun_again_with_others",
        "scores of one seed after those of another are another choice",
    ),
)
