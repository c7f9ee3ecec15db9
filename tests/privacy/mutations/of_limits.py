"""Mistakes in what a job may spend, and in what `forget` leaves."""

_FORGET = "tests/run/test_forget.py::"
_RACES = "tests/run/test_forget_races.py::"
_STAYS = "test_what_is_private_goes_and_what_proves_the_release_stays"

MUTATIONS = (
    {
        "name": "limit_does_not_count_the_own_release",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "for folder in limit.folders:",
        "new": "for folder in limit.folders[:0]:",
        "tests": (
            "tests/run/test_budget.py::"
            "test_a_stage_is_refused_before_it_spends_and_runs_within_its_budget",
        ),
        "why": "what the same workdir released is not part of the total",
    },
    {
        "name": "limit_takes_forged_certificates",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "    for path, why in found.refused.items():\n",
        "new": "    for path, why in list(found.refused.items())[:0]:\n",
        "tests": (
            "tests/run/test_budget.py::test_a_limit_needs_certificates_that_hold",
        ),
        "why": "a release whose certificate was edited would cost nothing",
    },
    {
        "name": "what_a_link_releases_costs_nothing",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "(os.path.realpath(folder), released, private and not released)",
        "new": "(os.path.realpath(folder), False, False)",
        "tests": (
            "tests/run/test_budget.py::"
            "test_what_a_link_releases_is_counted_wherever_it_lies",
        ),
        "why": "a model in private/ that a link in release/ releases is not counted",
    },
    {
        "name": "limit_of_a_private_run_counts_no_release",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "for above in (inside, *inside.parents[:2]):",
        "new": "for above in (inside, *inside.parents[:1]):",
        "tests": (
            "tests/run/test_budget.py::"
            "test_what_stays_private_counts_the_releases_next_to_it",
        ),
        "why": "a run in private/ is limited as if nothing had been released before",
    },
    {
        "name": "links_to_what_is_private_are_not_released",
        "kind": "release",
        "file": "tfdpsq/run/core/spending.py",
        "old": """\
            _require_releasable(found, inside)
            continue
""",
        "new": """\
            continue
""",
        "tests": (
            "tests/run/test_budget.py::"
            "test_a_link_that_releases_what_is_private_is_named",
        ),
        "why": "private queries that a link releases are said to be not released",
    },
    {
        "name": "links_to_unmarked_private_folders_pass",
        "kind": "release",
        "file": "tfdpsq/run/core/spending.py",
        "old": "elif states is None and releases.is_under_private(real):",
        "new": "elif False:",
        "tests": (
            "tests/run/test_budget.py::"
            "test_a_link_that_releases_what_is_private_is_named",
        ),
        "why": "logs of private losses that a link releases are passed over",
    },
    {
        "name": "forget_deletes_what_a_link_releases",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "    _keep_linked(made, root / releases.RELEASE_FOLDER)\n",
        "new": "",
        "tests": (_FORGET + "test_what_a_link_under_release_leads_to_is_kept",),
        "why": "the certificate of what was released is gone, and its link broken",
    },
    {
        "name": "forget_deletes_the_ledger",
        "kind": "ledger",
        "file": "tfdpsq/run/forget.py",
        "old": "            if name == ledger.FILE_NAME:\n",
        "new": "            if name == ledger.FORMAT:\n",
        "tests": (_FORGET + _STAYS,),
        "why": "its owner can no longer compare a certificate with what was paid",
    },
    {
        "name": "forget_keeps_a_private_stage_outside_private",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "        elif _guarantee(path) == releases.PRIVATE:\n",
        "new": "        elif _guarantee(path) == releases.PRIVATE_FOLDER * 2:\n",
        "tests": (_FORGET + _STAYS,),
        "why": "metrics of private queries outlive the retention period",
    },
    {
        "name": "forget_leaves_the_pages_of_a_reproduction",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "    made.delete += examples\n",
        "new": "",
        "tests": (_FORGET + "test_the_pages_of_a_reproduction_are_deleted",),
        "why": "private queries are quoted in a workdir that was forgotten",
    },
    {
        "name": "forget_leaves_outputs_for_each_set",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "                _plan_sets(made, path, sets)\n",
        "new": "                pass\n",
        "tests": (_FORGET + "test_an_output_for_each_set_is_deleted",),
        "why": "judgements of private queries outlive the workdir",
    },
    {
        "name": "forget_does_not_name_outputs_deeper_in_private",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": '            made.unsure += sorted(each for each in path.rglob("*") '
        "if _is_file(each))\n",
        "new": "            made.left.append(path)\n",
        "tests": (_FORGET + "test_outputs_deeper_in_a_private_directory_are_named",),
        "why": "private measures stay, and the command says that all is gone",
    },
    {
        "name": "forget_looks_for_stages_before_its_mark_alone",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "            made = plan(directory, private)\n",
        "new": "            pass\n",
        "tests": (
            _RACES + "test_a_stage_that_begins_after_the_first_look_is_not_deleted",
        ),
        "why": "what a stage that began meanwhile makes of private queries stays",
    },
    {
        "name": "outputs_look_once_whether_their_workdir_was_forgotten",
        "kind": "release",
        "file": "tfdpsq/run/core/outputs.py",
        "old": "    if output.owner_only:\n        dataclasses",
        "new": "    if False:\n        dataclasses",
        "tests": (
            _RACES
            + "test_an_output_declared_before_its_workdir_was_forgotten_is_not_made",
            _RACES
            + "test_an_output_whose_workdir_is_forgotten_while_it_is_made_is_removed",
        ),
        "why": "a stage that began before writes what is private after it",
    },
    {
        "name": "certificates_of_one_folder_are_one_release",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "place = folder if path.name == FILE_NAME else path",
        "new": "place = folder if path.name else path",
        "tests": (
            "tests/run/test_budget.py::test_certificates_of_one_folder_are_all_counted",
        ),
        "why": "of the certificates that were collected in a folder the last counts",
    },
    {
        "name": "limit_does_not_follow_the_link_to_a_release",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "map(pathlib.Path, releases.spellings(os.fspath(place))):",
        "new": "[pathlib.Path(os.path.abspath(place))]:",
        "tests": (
            "tests/run/test_budget.py::test_a_workdir_under_a_link_has_its_releases",
        ),
        "why": "what was released next to the new run is not part of the total",
    },
    {
        "name": "forget_takes_any_directory_for_a_private_one",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "    elif not _is_private(own):\n",
        "new": "    elif not own.is_dir():\n",
        "tests": (
            _FORGET + "test_a_directory_is_private_only_if_a_stage_kept_secrets_there",
        ),
        "why": "logs and runs of other programs are deleted",
    },
    {
        "name": "forget_deletes_what_was_released",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "    elif releases.is_released(own):\n",
        "new": "    elif releases.is_released(root):\n",
        "tests": (
            _FORGET + "test_a_directory_is_private_only_if_a_stage_kept_secrets_there",
        ),
        "why": "the certificates of what others hold are gone",
    },
    {
        "name": "limit_of_a_job_counts_its_first_run",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "    if planned:\n",
        "new": "    if len(planned) == 1:\n",
        "tests": (
            "tests/run/test_budget.py::test_a_job_is_refused_before_its_first_stage_if"
            "_all_its_runs_exceed_the_limit",
        ),
        "why": "the generator is paid for, and the rest of its job refused",
    },
    {
        "name": "budget_passes_over_a_link_to_a_workdir",
        "kind": "release",
        "file": "tfdpsq/run/core/spending.py",
        "old": "            _require_inside(found, inside)\n",
        "new": "            pass\n",
        "tests": (
            "tests/run/test_budget.py::test_a_link_to_a_workdir_or_its_report_is_named",
        ),
        "why": "seeds of the noise are released, and no word is said of it",
    },
    {
        "name": "budget_passes_over_a_link_to_a_report",
        "kind": "release",
        "file": "tfdpsq/run/core/spending.py",
        "old": "    elif real.name in layout.JOB_FILES and (\n",
        "new": "    elif real.name in () and (\n",
        "tests": (
            "tests/run/test_budget.py::test_a_link_to_a_workdir_or_its_report_is_named",
        ),
        "why": "private queries are released, and no word is said of it",
    },
    {
        "name": "links_to_files_of_an_artefact_cost_nothing",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": """\
            if counts or releases.is_released(inside):
                _add_linked(found, inside)
""",
        "new": "",
        "tests": (
            "tests/run/test_budget_links.py::"
            "test_a_link_to_a_part_costs_what_all_of_it_does",
        ),
        "why": "an adapter's only file is released, and its run is in no total",
    },
    {
        "name": "links_to_folders_of_an_artefact_cost_nothing",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": """\
    if counts:
        _add_linked(found, folder)
""",
        "new": "",
        "tests": (
            "tests/run/test_budget_links.py::"
            "test_a_link_to_a_part_costs_what_all_of_it_does",
        ),
        "why": "an index's documents are released, and its run is in no total",
    },
    {
        "name": "certificate_above_a_private_directory_covers_its_keys",
        "kind": "release",
        "file": "tfdpsq/run/core/spending.py",
        "old": "if artefact and releases.PRIVATE_FOLDER not in inside:",
        "new": "if artefact:",
        "tests": (
            "tests/run/test_budget_links.py::"
            "test_a_certificate_above_a_private_directory_does_not_cover_its_keys",
        ),
        "why": "a key is released, and no word is said of it",
    },
    {
        "name": "limit_reserves_nothing",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "        _reserve(limit.folders)\n",
        "new": "        _reserve(())\n",
        "tests": (
            "tests/run/test_budget.py::"
            "test_a_stage_keeps_others_from_the_budget_that_it_is_about_to_spend",
        ),
        "why": "two stages that begin together are each within a budget for one",
    },
    {
        "name": "budget_without_the_sets_that_lost_their_certificate",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "_MARKED = (FILE_NAME, *certificate_files.MARKED)\n",
        "new": "_MARKED = (FILE_NAME, *certificate_files.MARKED[:-1])\n",
        "tests": (
            "tests/run/test_budget.py::test_a_set_whose_certificate_was_lost_is_named",
        ),
        "why": "the total of what is left is said to be that of all",
    },
    {
        "name": "certified_output_whose_set_is_gone_costs_nothing",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "        _require_certificate(found, folder)\n",
        "new": "        pass\n",
        "tests": (
            "tests/run/test_budget.py::test_a_set_whose_certificate_was_lost_is_named",
        ),
        "why": "it was released, and its run is in no total any more",
    },
    {
        "name": "forget_takes_unfinished_directories_by_their_names",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "    if all(isinstance(certificate_files.stated(record, e), dict) "
        "for e in entries):\n",
        "new": "    if True:\n",
        "tests": (_FORGET + "test_unfinished_directories_are_ours_by_their_records",),
        "why": "somebody's own files are deleted",
    },
    {
        "name": "units_of_runs_not_compared",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": '            "unit",\n            "num_units",',
        "new": '            "num_units",',
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_runs_that_do_not_belong_together_are_refused",
        ),
        "why": "a query is promised what a run by pairs does not give it",
    },
    {
        "name": "secure_of_runs_not_compared",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": '            "delta",\n            "secure",',
        "new": '            "delta",',
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_runs_that_do_not_belong_together_are_refused",
        ),
        "why": "runs of the default generator have the words of secure ones",
    },
    {
        "name": "dropout_of_a_secure_run_from_its_key",
        "kind": "secure",
        "file": "tfdpsq/privacy/randomness/secure.py",
        "old": "self._subkeys[purpose][:16]",
        "new": "self.key[:16]",
        "tests": (
            "tests/privacy/test_secure.py::"
            "test_seeds_for_other_generators_are_of_subkeys_and_tell_no_key",
        ),
        "why": "half of the key of noise and samples seeds TensorFlow's own draws",
    },
    {
        "name": "texts_encoded_after_the_payment",
        "kind": "ledger",
        "file": "tfdpsq/privacy/batches.py",
        "old": '        if batch[name].dtype.kind == "U":',
        "new": "        if False:",
        "tests": (
            "tests/privacy/test_quoted_values.py::"
            "test_a_text_that_tensorflow_does_not_take_costs_no_step",
        ),
        "why": "one text ends a run that was paid for, and it cannot go on",
    },
    {
        "name": "values_that_take_looks_up_quoted",
        "kind": "reads",
        "file": "tfdpsq/privacy/trials.py",
        "old": "    @unquoted_values(*_NOT_TAKEN)\n    def few",
        "new": "    def few",
        "tests": (
            "tests/privacy/test_quoted_values.py::"
            "test_what_take_looks_up_is_not_quoted",
        ),
        "why": "a value of a private row stands in an error message",
    },
    {
        "name": "early_stop_counts_as_planned",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/composition.py",
        "old": "_epsilon([to_the_last_step(release)], release.delta",
        "new": "_epsilon([release], release.delta",
        "tests": (
            "tests/privacy/test_budget.py::"
            "test_a_run_that_stopped_early_counts_whole_unless_nobody_looked",
        ),
        "why": "a run stopped for what its weights showed has the smaller epsilon",
    },
    {
        "name": "stopped_runs_leave_more_of_a_budget",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/budget.py",
        "old": "{name: to_the_last_step(release) for name, release in every",
        "new": "{name: release for name, release in every",
        "tests": (
            "tests/privacy/test_budget.py::"
            "test_a_run_that_stopped_early_counts_whole_unless_nobody_looked",
        ),
        "why": "the next run is allowed what the stopped ones may have spent",
    },
    {
        "name": "logs_show_the_batch_of_a_refused_value",
        "kind": "reads",
        "file": "tfdpsq/privacy/environment.py",
        "old": 'if not lazy.is_loaded("tensorflow"):\n    os',
        "new": "if False:\n    os",
        "tests": (
            "tests/privacy/test_quoted_values.py::"
            "test_tensorflow_logs_no_row_of_a_refused_batch_or_it_is_said",
        ),
        "why": "TensorFlow writes private labels of a whole batch to stderr",
    },
    {
        "name": "validation_first_evaluated_after_an_epoch",
        "kind": "ledger",
        "file": "tfdpsq/privacy/model.py",
        "old": "            self._try_validation(validation_data)\n",
        "new": "            pass\n",
        "tests": (
            "tests/privacy/test_quoted_values.py::"
            "test_validation_that_cannot_be_evaluated_costs_no_epoch",
        ),
        "why": "a misspelt metric ends a run whose steps are spent",
    },
)
