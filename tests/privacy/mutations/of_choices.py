"""Mistakes in choices: of a generator among runs, and of what is kept or left out.

Queries that filters drop, negatives that are mined, files that `forget` deletes, layers
that LoRA adapts, and what an audit and a run that diverged count.
"""

_CHOOSE = "tfdpsq/run/choose.py"
_INSIDE = "tests/run/test_choose_inside.py::"
_MAKE = "tests/run/test_choose_make.py::"
_COUNTED = _MAKE + "test_the_certificate_counts_all_runs_the_choice_and_the_reads"

_FILTER = "tfdpsq/run/filter.py"
_OF_FILTERS = "tests/run/test_filter.py::"
_SECRETS = _OF_FILTERS + "test_secrets_of_canaries_are_dropped"
_CHANGED = _OF_FILTERS + "test_an_input_that_changed_in_its_place_is_another_one"
_PASSES = _OF_FILTERS + "test_what_passes_keeps_its_guarantee_and_its_origin"
_MINE = "tfdpsq/run/mine.py"
_NEGATIVES = "tfdpsq/run/training/hard_negatives.py"
_OF_MINING = "tests/run/test_mine.py::"
_FORGET = "tfdpsq/run/forget.py"
_OF_FORGETTING = "tests/run/test_forget.py::"
_LORA = "tfdpsq/layers/lora.py"
_OF_LORA = "tests/layers/test_lora.py::"
_OF_AUDITS = "tests/run/test_audit_stage.py::"
_LOOP = "tfdpsq/privacy/loop.py"
_HOOKS = "tests/privacy/test_paid_steps.py::test_hooks_see_no_step_a_second_time"


MUTATIONS = (
    (
        "a_choice_with_the_certificate_of_its_run",
        "certificate",
        _CHOOSE,
        "records.write_certificate(out, certificate)",
        'records.write_certificate(out, own[selection.chosen]["certificate"])',
        _COUNTED,
        "epsilon of one run is stated for one chosen among many",
    ),
    (
        "a_choice_without_its_reads",
        "reads",
        _CHOOSE,
        "records.all_private_reads(self._private),",
        "[],",
        _COUNTED,
        "the certificate hides what no epsilon covers",
    ),
    (
        "a_choice_without_reads_that_are_listed_deeper",
        "reads",
        _CHOOSE,
        "records.all_private_reads(self._private),",
        "records.private_reads(self._private, self._config.finetune.strict).entries,",
        _COUNTED,
        "the certificate hides reads of outputs below the private directory",
    ),
    (
        "a_draw_that_is_called_declared",
        "certificate",
        _CHOOSE,
        '            chosen["epsilon"],\n',
        "            None,\n",
        _COUNTED,
        "the epsilon of the draw is not stated, nor composed by budget",
    ),
    (
        "other_weights_than_those_chosen",
        "release",
        _CHOOSE,
        "self._point(selection.chosen).iterdir()",
        "self._point(points[0].name).iterdir()",
        _MAKE + "test_the_weights_are_those_that_the_certificate_names",
        "a second run's weights are released under the certificate of the first's",
    ),
    (
        "a_choice_among_runs_of_which_none_diverged",
        "composition",
        _CHOOSE,
        'own[point.name]["diverged"],\n            )',
        "False,\n            )",
        _COUNTED,
        "the certificate counts candidates that could not be chosen",
    ),
    (
        "a_declared_choice_of_the_lowest_score",
        "certificate",
        _CHOOSE,
        'max(names, key=lambda name: scores[name]["bleu"])',
        'min(names, key=lambda name: scores[name]["bleu"])',
        _INSIDE + "test_a_declared_choice_is_the_highest_of_the_scores",
        "the certificate says that the highest score was taken",
    ),
    (
        "a_pair_in_both_splits_of_a_choice",
        "composition",
        _CHOOSE,
        "        if both:\n",
        '        if both and shared.unit != "pair":\n',
        _INSIDE + "test_a_query_in_both_splits_is_refused",
        "a pair has a part in training and in the choice, and pays for one of them",
    ),
    (
        "a_choice_by_queries_without_the_prompt",
        "sampling",
        "tfdpsq/run/synthesize.py",
        '        prompt=trained["prompt"],\n',
        "",
        _MAKE + "test_a_point_writes_with_the_prompt_it_was_trained_with",
        "what is scored is not what the generator writes",
    ),
    (
        "a_paid_grid_goes_on_with_other_samples",
        "composition",
        "tfdpsq/run/training/choice_points.py",
        '"synthesize": {**writing, "batch_size": None}',
        '"synthesize": None',
        _INSIDE + "test_a_grid_that_paid_for_a_step_is_not_begun_again_with_others",
        "scores of one seed after those of another are another choice",
    ),
    (
        "secrets_of_the_first_canary_alone_are_dropped",
        "release",
        _FILTER,
        "for canary in made]",
        "for canary in made[:1]]",
        _SECRETS,
        "a secret that was put in is in what is released",
    ),
    (
        "secrets_of_canaries_with_a_coin_alone_are_dropped",
        "release",
        _FILTER,
        "for canary in made]",
        "for canary in made if canary.coin]",
        _SECRETS,
        "the secrets that were repeated most often stay in the set",
    ),
    (
        "a_filter_forgets_its_corpus",
        "resumes",
        _FILTER,
        '        "corpus": sources.corpus_fingerprint(config.corpus),\n',
        "",
        _CHANGED + "[corpus]",
        "what other documents let pass is taken for what these do",
    ),
    (
        "a_filter_forgets_its_retriever",
        "resumes",
        _FILTER,
        '        inputs["retriever"] = workdir.stage_fingerprint(judge)\n',
        "",
        _CHANGED + "[retriever]",
        "a set that another retriever judged is taken for this one's",
    ),
    (
        "a_filter_forgets_its_canaries",
        "resumes",
        _FILTER,
        '        inputs["canaries"] = workdir.stage_fingerprint(config.canaries)\n',
        "        pass\n",
        _CHANGED + "[canaries]",
        "a set that was searched for other secrets is taken for clean",
    ),
    (
        "a_filter_forgets_its_set",
        "resumes",
        _FILTER,
        '        "synthetic": manifest["fingerprint"],\n',
        "",
        _CHANGED + "[synthetic]",
        "the rows of a former set are taken for those of this one",
    ),
    (
        "a_filtered_set_without_a_card",
        "certificate",
        _FILTER,
        "        data_card.write(out / layout.SET, written)\n",
        "",
        _PASSES,
        "who gets the set is not told what it guarantees",
    ),
    (
        "a_filtered_set_does_not_say_what_it_was_made_from",
        "release",
        _FILTER,
        '                    "inputs": inputs,\n',
        "",
        _PASSES,
        "nobody can tell which set and corpus the rows are from",
    ),
    (
        "a_declared_origin_is_called_mined",
        "certificate",
        _NEGATIVES,
        '    return f"{count}, from a run declared to be made from {BY_QUERY}"',
        '    return f"{count}, mined by bm25 from {BY_QUERY}"',
        _OF_MINING + "test_a_declared_origin_is_called_one",
        "the certificate states as a fact what somebody declared",
    ),
    (
        "judged_negatives_of_the_training_split",
        "negatives",
        _NEGATIVES,
        "            judged = sources.open_beir(source.path).judgements(source.split)",
        '            judged = sources.open_beir(source.path).judgements("train")',
        _OF_MINING + "test_judgements_are_those_of_the_split_that_is_trained_on",
        "judgements of another split enter what a run on this one is certified for",
    ),
    (
        "negatives_that_were_mined_for_any_split",
        "negatives",
        _NEGATIVES,
        "if made != (pairs, source.split):",
        "if made[0] != pairs:",
        _OF_MINING + "test_what_was_mined_for_another_split_is_refused",
        "the negatives are not those of the units that the certificate counts",
    ),
    (
        "mining_forgets_its_corpus",
        "resumes",
        _MINE,
        '        "corpus": sources.corpus_fingerprint(corpus),\n',
        "",
        _OF_MINING + "test_documents_that_changed_in_their_place_are_mined_again",
        "negatives by the text of other documents are taken for those of these",
    ),
    (
        "negatives_for_a_private_set_without_its_certificate",
        "certificate",
        _MINE,
        "        records.write_certificate(out, certificate)\n",
        "",
        _OF_MINING + "test_what_is_mined_for_a_private_set_has_its_certificate",
        "what private queries had a part in looks like public data",
    ),
    (
        "private_points_are_not_forgotten",
        "release",
        _FORGET,
        '_FOLDERS = (".", releases.RELEASE_FOLDER, "points")',
        '_FOLDERS = (".", releases.RELEASE_FOLDER)',
        _OF_FORGETTING + "test_a_private_point_of_a_grid_is_deleted",
        "generators without a guarantee outlive the deletion",
    ),
    (
        "an_output_called_private_is_not_forgotten",
        "release",
        _FORGET,
        "if path.name == own.name and path.samefile(own):",
        "if path.name == own.name:",
        _OF_FORGETTING + "test_a_private_point_of_a_grid_is_deleted",
        "a private output is taken for the private directory, and stays",
    ),
    (
        "a_release_tells_when_it_was_forgotten",
        "release",
        _FORGET,
        "    for folder in {path.parent for path in made.delete}:\n"
        '        outputs.settle(folder / "x")\n',
        "",
        _OF_FORGETTING + "test_no_time_of_the_release_tells_when_it_was_forgotten",
        "times of directories are released with what is in them",
    ),
    (
        "an_output_is_as_private_as_its_first_set",
        "release",
        _FORGET,
        "            states = {_guarantee(each) for each in sets} - {None}",
        "            states = {_guarantee(each) for each in sets[:1]} - {None}",
        _OF_FORGETTING + "test_an_output_with_one_private_set_is_private",
        "private judgements of a later set are not deleted",
    ),
    (
        "ledgers_in_outputs_are_forgotten",
        "ledger",
        _FORGET,
        "if name == ledger.FILE_NAME:",
        "if name == ledger.FILE_NAME and written is not None:",
        _OF_FORGETTING + "test_a_ledger_in_an_output_is_kept",
        "the proof of what was spent is deleted",
    ),
    (
        "a_loaded_update_is_scaled_by_its_rank",
        "LoRA",
        _LORA,
        '                "alpha": self.alpha,\n',
        '                "alpha": float(self.rank),\n',
        _OF_LORA + "test_its_config_makes_it_again",
        "a model that is loaded computes something other than the one saved",
    ),
    (
        "lora_adapts_the_layers_inside_lora",
        "LoRA",
        _LORA,
        "if id(layer) in seen or isinstance(layer, LoRADense):",
        "if id(layer) in seen:",
        _OF_LORA + "test_a_second_call_leaves_alone_what_the_first_one_wraps",
        "the frozen layer and the update are replaced by updates of their own",
    ),
    (
        "secrets_in_the_set_are_those_that_the_generator_writes",
        "release",
        "tfdpsq/run/audit.py",
        "    in_set = evaluation.leaked_secrets(secrets, texts).found\n",
        "    in_set = leaked\n",
        _OF_AUDITS
        + "test_secrets_in_the_set_are_counted_apart_from_those_that_it_writes",
        "an audit says that a set with a secret in it has none",
    ),
    (
        "an_audit_counts_copies_of_what_it_put_in",
        "release",
        "tfdpsq/run/attacks/audit_subject.py",
        "            if not row.document_id.startswith(canary_set.ID_PREFIX)\n",
        "",
        _OF_AUDITS
        + "test_what_is_written_for_canaries_documents_is_no_part_of_the_set",
        "a secret that was shown to the generator is said to have leaked",
    ),
    (
        "calls_that_are_repeated_are_announced_twice",
        "resumes",
        _LOOP,
        "if self.hooks.before_call is not None and not diverged_at:",
        "if self.hooks.before_call is not None:",
        _HOOKS,
        "callbacks see epochs again that were paid for once",
    ),
    (
        "losses_of_steps_that_are_repeated_are_reported_twice",
        "resumes",
        _LOOP,
        "if self.hooks.on_step is not None and not diverged_at:",
        "if self.hooks.on_step is not None:",
        _HOOKS,
        "a hook that stops by what it counts has counted steps twice",
    ),
)
