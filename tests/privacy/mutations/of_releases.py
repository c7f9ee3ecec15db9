"""Mistakes in what is read, released, and done again after a kill."""

MUTATIONS = (
    {
        "name": "training_losses_read_in_silence",
        "kind": "reads",
        "file": "tfdpsq/run/training/private_training.py",
        "old": ".record(**LOSS_READ)\n",
        "new": ".entries.append(LOSS_READ)\n",
        "tests": (
            "tests/run/test_lineage.py::"
            "test_private_reads_are_on_record_before_training_and_in_the_certificate",
        ),
        "why": ("a run set up by losses that somebody watched says that nobody did"),
    },
    {
        "name": "losses_of_fit_read_in_silence",
        "kind": "reads",
        "file": "tfdpsq/privacy/model.py",
        "old": (
            '            self.reads.record("the training loss of every '
            'step", "the history of fit()")'
        ),
        "new": "            pass",
        "tests": (
            "tests/privacy/test_model.py::"
            "test_validation_is_recorded_as_a_private_read_and_refused_in_strict_mode",
        ),
        "why": ("the same, in Keras's fit"),
    },
    {
        "name": "evaluation_on_private_queries_unrecorded",
        "kind": "reads",
        "file": "tfdpsq/run/evaluate.py",
        "old": """\
    reads.record(f"the queries and judgements of split {config.split!r}", where)
""",
        "new": "",
        "tests": (
            "tests/run/test_lineage.py::"
            "test_strict_training_reads_and_shows_nothing_beside_the_budget",
        ),
        "why": (
            "what was chosen by these metrics carries a certificate that "
            "does not say so"
        ),
    },
    {
        "name": "certificate_without_the_private_reads",
        "kind": "reads",
        "file": "tfdpsq/run/finetune.py",
        "old": "private_reads=reads,",
        "new": "private_reads=[],",
        "tests": (
            "tests/run/test_lineage.py::"
            "test_private_reads_are_on_record_before_training_and_in_the_certificate",
        ),
        "why": ("what no ε covers is not told"),
    },
    {
        "name": "durations_in_the_release",
        "kind": "release",
        "file": "tfdpsq/run/core/workdir.py",
        "old": ("        stage = write_stage(temporary, output, wanted, result)\n"),
        "new": """\
        result = {**(result or {}), "seconds": round(time.monotonic() - started, 2)}
        stage = write_stage(temporary, output, wanted, result)
""",
        "tests": (
            "tests/run/test_release_secrets.py::"
            "test_what_a_stage_writes_does_not_depend_on_how_long_it_took[stage]",
        ),
        "why": ("how long a private stage took depends on the data"),
    },
    {
        "name": "rates_of_passes_in_the_release",
        "kind": "release",
        "file": "tfdpsq/run/passes/sharded_stages.py",
        "old": "lambda out: dict(merge(out, shards)),",
        "new": (
            'lambda out: {**merge(out, shards), "rate": time.monotonic() - started},'
        ),
        "tests": (
            "tests/run/test_release_secrets.py::"
            "test_what_a_stage_writes_does_not_depend_on_how_long_it_took[pass]",
        ),
        "why": ("the same, in a stage of shards"),
    },
    {
        "name": "canaries_chosen_for_the_release",
        "kind": "release",
        "file": "tfdpsq/run/training/context.py",
        "old": """\
    canary_set.require_private_output(config.pairs, private, directory)
""",
        "new": "",
        "tests": (
            "tests/run/test_choose_inside.py::"
            "test_what_is_chosen_on_canaries_is_not_for_release",
        ),
        "why": ("a generator that knows the secrets of an audit is published"),
    },
    {
        "name": "plain_hash_of_a_private_run",
        "kind": "release",
        "file": "tfdpsq/run/training/hard_negatives.py",
        "old": 'found["hard_negatives"] = sources.keyed_fingerprint(run, private)',
        "new": 'found["hard_negatives"] = run',
        "tests": (
            "tests/run/test_mine.py::test_public_negatives_take_a_rows_own_and_say_so",
        ),
        "why": ("guesses at the queries that a run was mined for can be tested"),
    },
    {
        "name": "losses_shown_by_fit_in_strict_mode",
        "kind": "release",
        "file": "tfdpsq/privacy/model.py",
        "old": (
            '        if not self._model.reads.strict:\n            logs["loss"] = np'
        ),
        "new": '        if True:\n            logs["loss"] = np',
        "tests": (
            "tests/privacy/test_model.py::"
            "test_validation_is_recorded_as_a_private_read_and_refused_in_strict_mode",
        ),
        "why": ("strict mode promises that nothing is shown but ε"),
    },
    {
        "name": "judge_of_the_same_epsilon_accepted",
        "kind": "filters",
        "file": "tfdpsq/run/filter.py",
        "old": """\
    own = None if certificate is None else certificate["digest"]
    if found is None or found["digest"] == own:
""",
        "new": """\
    own = None if certificate is None else certificate["guarantee"]["epsilon"]
    if found is None or found["guarantee"]["epsilon"] == own:
""",
        "tests": (
            "tests/run/test_filter.py::"
            "test_a_retriever_with_another_guarantee_is_refused[8.0]",
        ),
        "why": ("two runs of ε = 8 are not one: what both had a part in costs both"),
    },
    {
        "name": "filtered_set_without_its_certificate",
        "kind": "filters",
        "file": "tfdpsq/run/filter.py",
        "old": """\
                certificate=manifest["certificate"],
""",
        "new": """\
                certificate=None,
""",
        "tests": (
            "tests/run/test_filter.py::"
            "test_what_passes_keeps_its_guarantee_and_its_origin",
        ),
        "why": ("the set passes for public, and so does what is made from it"),
    },
    {
        "name": "judge_not_asked_for_its_guarantee",
        "kind": "filters",
        "file": "tfdpsq/run/filter.py",
        "old": """\
        require_same_guarantee(judge, config.synthetic, manifest["certificate"])
""",
        "new": "",
        "tests": (
            "tests/run/test_filter.py::"
            "test_a_retriever_with_another_guarantee_is_refused[3.0]",
        ),
        "why": ("a retriever trained on private pairs decides what is released"),
    },
    {
        "name": "microbatches_changed_on_resume",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": """\
        "microbatch_size": repr(microbatch_size),
""",
        "new": "",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_a_run_goes_on_with_what_its_paid_steps_were_made_with[microbatches]",
        ),
        "why": ("the steps that are repeated have other masks"),
    },
    {
        "name": "optimizer_changed_on_resume",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": """\
        "optimizer": repr(sorted(config.items(), key=str)),
""",
        "new": "",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_a_run_goes_on_with_what_its_paid_steps_were_made_with[optimizer]",
        ),
        "why": ("a paid gradient is shown twice, through two updates"),
    },
    {
        "name": "compiler_changed_on_resume",
        "kind": "resumes",
        "file": "tfdpsq/privacy/training.py",
        "old": """\
        "jit_compile": repr(_compiled_by_xla(jit_compile)),
""",
        "new": "",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_a_run_goes_on_with_what_its_paid_steps_were_made_with[compiler]",
        ),
        "why": ("XLA draws other random numbers: the repeated steps are other ones"),
    },
    {
        "name": "stage_goes_on_with_other_data",
        "kind": "resumes",
        "file": "tfdpsq/run/training/private_training.py",
        "old": (
            "        if differences:\n"
            "            raise validation.InputError(\n"
            '                f"{directory} holds a run'
        ),
        "new": (
            "        if differences is None:\n"
            "            raise validation.InputError(\n"
            '                f"{directory} holds a run'
        ),
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_a_run_that_paid_goes_on_with_its_own_settings_and_data",
        ),
        "why": ("one ledger for two data sets"),
    },
    {
        "name": "paid_run_without_settings_taken_for_none",
        "kind": "resumes",
        "file": "tfdpsq/run/training/private_training.py",
        "old": "        if not found:\n",
        "new": "        if found is None:\n",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_a_run_that_paid_is_not_taken_for_none_without_its_settings",
        ),
        "why": "rows made with other settings are trained on, and not stated",
    },
    {
        "name": "lost_key_replaced_under_a_paid_run",
        "kind": "resumes",
        "file": "tfdpsq/run/core/sources.py",
        "old": "        _require_no_paid_run(private_directory, path)\n",
        "new": "",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_a_lost_key_is_not_replaced_where_steps_are_paid",
        ),
        "why": "data that were paid for are called others, for good",
    },
    {
        "name": "rows_of_the_data_before_kept",
        "kind": "resumes",
        "file": "tfdpsq/run/training/private_training.py",
        "old": ("            checkpoint.discard(directory)\n        wanted.update"),
        "new": ("            pass\n        wanted.update"),
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_rows_of_other_data_do_not_outlive_a_change_before_the_first_step",
        ),
        "why": ("training is on rows that its certificate does not name"),
    },
    {
        "name": "choice_drawn_again",
        "kind": "resumes",
        "file": "tfdpsq/run/choose.py",
        "old": (
            "        if not path.is_file():\n"
            "            found = self._choice(names, runs, held_out)"
        ),
        "new": (
            "        if path:\n            found = self._choice(names, runs, held_out)"
        ),
        "tests": (
            "tests/run/test_choose_inside.py::"
            "test_what_was_drawn_once_is_never_drawn_again",
        ),
        "why": ("every draw is a release of its own, and one is counted"),
    },
    {
        "name": "grid_begun_again_with_fewer_points",
        "kind": "resumes",
        "file": "tfdpsq/run/training/choice_points.py",
        "old": ('if changed and any(_paid(run_of(name)) for name in found["points"]):'),
        "new": ('if changed and all(_paid(run_of(name)) for name in found["points"]):'),
        "tests": (
            "tests/run/test_choose_inside.py::"
            "test_a_grid_that_paid_for_a_step_is_not_begun_again_with_others",
        ),
        "why": ("points that were trained and seen are left out of ε"),
    },
    {
        "name": "rows_of_a_set_copied_without_it",
        "kind": "composition",
        "file": "tfdpsq/run/core/sources.py",
        "old": """\
            if (folder / PART_FILE).is_file():
                return folder / PART_FILE
""",
        "new": "            pass\n",
        "tests": (
            "tests/run/test_lineage.py::"
            "test_a_set_made_without_protection_cannot_be_protected_afterwards",
        ),
        "why": "one private query had a part in all rows, and each is taken for a unit",
    },
    {
        "name": "nothing_below_a_private_artefact_counts",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "            counts, private = False, True\n",
        "new": "            return\n",
        "tests": (
            "tests/run/test_budget.py::"
            "test_everything_finished_below_release_is_counted",
        ),
        "why": "a job below an import released, and the total leaves it out",
    },
    {
        "name": "zero_shot_of_private_pairs_called_public",
        "kind": "release",
        "file": "tfdpsq/run/zero_shot.py",
        "old": "if not config.private and releases.stated(part.path) ==",
        "new": "if False and releases.stated(part.path) ==",
        "tests": (
            "tests/run/test_import.py::"
            "test_imported_pairs_are_an_input_as_any_private_pairs",
        ),
        "why": "metrics and judgements of private queries lie under release/",
    },
    {
        "name": "overlap_with_private_queries_called_public",
        "kind": "release",
        "file": "tfdpsq/run/overlap.py",
        "old": "        _require_public(parts)\n",
        "new": "        pass\n",
        "tests": (
            "tests/run/test_import.py::"
            "test_imported_pairs_are_an_input_as_any_private_pairs",
        ),
        "why": "which guessed texts occur in private queries is told without noise",
    },
    {
        "name": "queries_beside_a_corpus_are_public_text",
        "kind": "release",
        "file": "tfdpsq/run/core/sources.py",
        "old": '    if name.startswith("queries.jsonl"):\n',
        "new": "    if False:\n",
        "tests": (
            "tests/run/test_overlap_stage.py::"
            "test_the_corpus_of_public_results_is_no_private_text",
        ),
        "why": "which documents occur in private queries is told under release/",
    },
    {
        "name": "numbers_of_two_runs_have_the_firsts_certificate",
        "kind": "composition",
        "file": "tfdpsq/run/zero_shot.py",
        "old": "if len(found) < 2:",
        "new": "if len(found) < 3:",
        "tests": (
            "tests/run/test_zero_shot.py::"
            "test_numbers_of_two_private_runs_have_no_certificate",
        ),
        "why": "numbers that depend on two runs are released under the epsilon of one",
    },
    {
        "name": "prepare_releases_the_number_of_queries",
        "kind": "release",
        "file": "tfdpsq/run/prepare.py",
        "old": '"public_pairs": manifest["count"]}',
        "new": '"public_pairs": manifest["count"], "queries": counts.queries}',
        "tests": (
            "tests/run/test_releases.py::"
            "test_what_prepare_releases_depends_on_no_private_query",
        ),
        "why": "the exact number of private queries is released, where n is a secret",
    },
    {
        "name": "a_crash_writes_memory_to_disk",
        "kind": "release",
        "file": "tfdpsq/run/core/command.py",
        "old": "resource.setrlimit(resource.RLIMIT_CORE, (0, most))",
        "new": "resource.setrlimit(resource.RLIMIT_CORE, (most, most))",
        "tests": (
            "tests/run/test_console.py::"
            "test_a_stage_that_crashes_leaves_no_memory_on_disk",
        ),
        "why": "a core dump holds private queries and the seeds of the noise",
    },
    {
        "name": "what_a_job_keeps_private_is_public_text",
        "kind": "release",
        "file": "tfdpsq/run/core/sources.py",
        "old": "        if above.name == releases.PRIVATE_FOLDER and any(\n",
        "new": "        if not above.name and any(\n",
        "tests": (
            "tests/run/test_overlap_stage.py::"
            "test_private_files_of_a_job_are_no_public_text",
        ),
        "why": "weights pretrained on private files would carry no certificate",
    },
    {
        "name": "copied_rows_of_a_set_are_public_text",
        "kind": "release",
        "file": "tfdpsq/run/core/sources.py",
        "old": "        of_a_set = part or next(",
        "new": "        of_a_set = next(",
        "tests": (
            "tests/run/test_overlap_stage.py::"
            "test_the_corpus_of_public_results_is_no_private_text",
        ),
        "why": "the same of synthetic queries, whose certificate would be lost",
    },
    {
        "name": "a_file_of_a_set_is_a_raw_log_alone",
        "kind": "composition",
        "file": "tfdpsq/data/export.py",
        "old": "{tables.MARKED: tables.MARK},",
        "new": "{},",
        "tests": ("tests/run/test_convert_out.py::test_a_set_comes_back_row_by_row",),
        "why": "one private query has a part in all rows of what passes for raw",
    },
    {
        "name": "sets_and_canaries_imported_as_raw_pairs",
        "kind": "composition",
        "file": "tfdpsq/run/import.py",
        "old": "            _require_raw(table)\n",
        "new": "            pass\n",
        "tests": (
            "tests/run/test_import.py::test_what_a_stage_made_is_not_imported_as_a_log",
        ),
        "why": "one private query had a part in all rows, and each is taken for a unit",
    },
    {
        "name": "points_of_a_choice_certified",
        "kind": "composition",
        "file": "tfdpsq/run/choose.py",
        "old": "self._devices, stays_private=True)",
        "new": "self._devices)",
        "tests": (
            "tests/run/test_choose_inside.py::test_a_point_of_the_grid_stays_private",
        ),
        "why": "the runs and the choice that led to a point are in no ε of its set",
    },
    {
        "name": "points_of_older_choices_certified",
        "kind": "composition",
        "file": "tfdpsq/run/core/releases.py",
        "old": "        known.append(PRIVATE)  #",
        "new": "        known.append(CERTIFIED)  #",
        "tests": (
            "tests/run/test_releases.py::"
            "test_one_of_the_points_that_a_choice_was_among_is_not_released",
        ),
        "why": "the same in a workdir of before",
    },
    {
        "name": "values_quoted_by_errors_of_other_kinds",
        "kind": "reads",
        "file": "tfdpsq/privacy/loop.py",
        "old": """\
    tf.errors.OutOfRangeError,
    tf.errors.PermissionDeniedError,
    tf.errors.UnimplementedError,
    tf.errors.UnknownError,
""",
        "new": "",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_no_kind_of_error_quotes_a_value_of_a_row[key]",
            "tests/privacy/test_before_spending.py::"
            "test_no_kind_of_error_quotes_a_value_of_a_row[not implemented]",
        ),
        "why": "a private row's value is in a traceback that people send around",
    },
    {
        "name": "values_quoted_by_a_missing_file",
        "kind": "reads",
        "file": "tfdpsq/privacy/loop.py",
        "old": "    tf.errors.NotFoundError,\n",
        "new": "",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_no_kind_of_error_quotes_a_value_of_a_row[file]",
        ),
        "why": "a private row's file is named in a traceback that people send around",
    },
    {
        "name": "too_little_memory_quotes_a_row_that_is_tried",
        "kind": "reads",
        "file": "tfdpsq/privacy/loop.py",
        "old": "    except _NO_MEMORY:\n        raise validation",
        "new": "    except ZeroDivisionError:\n        raise validation",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_no_kind_of_error_quotes_a_row_that_is_tried",
        ),
        "why": "a private row's value is in a traceback that people send around",
    },
    {
        "name": "values_quoted_where_memory_is_short",
        "kind": "reads",
        "file": "tfdpsq/privacy/loop.py",
        "old": "raise self._without_memory(now) from None",
        "new": "raise self._without_memory(now)",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_no_kind_of_error_quotes_a_value_of_a_row[memory]",
        ),
        "why": "a private row's value is in a traceback that people send around",
    },
    {
        "name": "values_quoted_of_validation_data",
        "kind": "reads",
        "file": "tfdpsq/privacy/model.py",
        "old": """\
                with unquoted_values(
                    f"validation_data could not be evaluated after step {executed}",
                    f"Mend it. {executed} steps of this run are spent; with a "
                    "directory, fit goes on from those that are saved there.",
                ):
""",
        "new": "                if True:\n",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_validation_data_are_not_quoted_and_may_be_mended",
        ),
        "why": "a private row's value is in a traceback that people send around",
    },
    {
        "name": "a_search_that_is_copied_alone_is_unmarked",
        "kind": "release",
        "file": "tfdpsq/privacy/proof/certificate_files.py",
        "old": '"model/config.json", "search/config.json")',
        "new": '"model/config.json")',
        "tests": (
            "tests/run/test_rerank_stage.py::"
            "test_a_search_that_is_copied_alone_asks_for_its_certificate",
        ),
        "why": "what is deployed holds all weights, and --budget does not count it",
    },
)
