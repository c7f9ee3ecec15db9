"""Mistakes that put what is private where things are released."""

_RULE = "tests/run/test_releases.py::"
_FILE = "tfdpsq/run/core/releases.py"
_OUTPUTS = "tfdpsq/run/core/outputs.py"

MUTATIONS = (
    {
        "name": "stages_go_on_in_a_forgotten_workdir",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": """\
        for directory in kept:
            require_not_forgotten(directory)
""",
        "new": "",
        "tests": (
            "tests/run/test_forget.py::"
            "test_no_output_is_made_in_a_workdir_that_was_forgotten",
        ),
        "why": "new private outputs where the owner was told that nothing is left",
    },
    {
        "name": "release_seen_in_the_given_path_alone",
        "kind": "release",
        "file": _FILE,
        "old": "    return any(RELEASE_FOLDER in name.split("
        '"/") for name in spellings(place))\n',
        "new": '    return RELEASE_FOLDER in os.path.abspath(place).split("/")\n',
        "tests": (_RULE + "test_a_path_is_released_however_it_is_spelled",),
        "why": "a link into release/ would take in what is private",
    },
    {
        "name": "release_links_resolved_to_the_last_alone",
        "kind": "release",
        "file": _FILE,
        "old": "    for _ in range(_MOST_LINKS):\n",
        "new": "    for _ in range(1):\n",
        "tests": (_RULE + "test_a_path_is_released_however_it_is_spelled",),
        "why": "a link that leads through release/ to elsewhere is still found there",
    },
    {
        "name": "release_private_directory_inside",
        "kind": "release",
        "file": _FILE,
        "old": "        if not is_released(directory):\n            return directory\n",
        "new": "        return directory\n",
        "tests": (
            _RULE + "test_what_is_private_of_an_output_is_never_released",
            _RULE + "test_a_private_directory_that_would_be_released_is_refused",
        ),
        "why": "key, ledger, reads and losses would be released",
    },
    {
        "name": "release_private_directory_as_it_is_set",
        "kind": "release",
        "file": _FILE,
        "old": "        if is_released(given):\n",
        "new": "        if False:\n",
        "tests": (
            _RULE + "test_a_private_directory_that_would_be_released_is_refused",
        ),
        "why": "key, ledger, reads and losses would be released",
    },
    {
        "name": "release_takes_private_outputs",
        "kind": "release",
        "file": _FILE,
        "old": "        if self.guarantee == PRIVATE and is_released(self.place):\n",
        "new": "        if False:\n",
        "tests": (_RULE + "test_a_path_is_released_however_it_is_spelled",),
        "why": "a generator without protection could be released",
    },
    {
        "name": "release_of_an_infinite_epsilon_called_certified",
        "kind": "release",
        "file": _FILE,
        "old": "    return CERTIFIED if _is_finite(certificate) else PRIVATE\n",
        "new": "    return CERTIFIED\n",
        "tests": (_RULE + "test_the_guarantee_follows_from_certificates_and_marks",),
        "why": "a certificate also says that nothing is protected",
    },
    {
        "name": "release_mark_of_an_input_ignored",
        "kind": "release",
        "file": _FILE,
        "old": "    if any(stated(path) == PRIVATE for path in made_from if path):\n",
        "new": "    if False:\n",
        "tests": (_RULE + "test_the_guarantee_follows_from_certificates_and_marks",),
        "why": "what is trained on canaries would be released with its certificate",
    },
    {
        "name": "release_lineage_not_checked",
        "kind": "release",
        "file": "tfdpsq/run/core/workdir.py",
        "old": "    releases.check_lineage(output, plain(config))\n",
        "new": "",
        "tests": (_RULE + "test_no_stage_can_claim_more_than_what_it_is_made_from",),
        "why": "a stage that states too much would be believed",
    },
    {
        "name": "release_not_checked_after_it_is_made",
        "kind": "release",
        "file": _OUTPUTS,
        "old": "            releases.check_made(partial, output)\n",
        "new": "",
        "tests": (_RULE + "test_what_was_made_must_have_what_was_stated",),
        "why": "a certificate that was not written would not be missed",
    },
    {
        "name": "release_embeddings_of_private_queries_called_public",
        "kind": "release",
        "file": "tfdpsq/privacy/proof/certificate_files.py",
        "old": "    if certificate is None and _guarantee(stage) == PRIVATE:\n",
        "new": "    if False:\n",
        "tests": (
            _RULE
            + "test_what_is_private_without_a_certificate_is_not_taken_for_public",
        ),
        "why": "no certificate is how public artefacts look",
    },
    {
        "name": "release_key_readable_by_all",
        "kind": "release",
        "file": "tfdpsq/run/core/sources.py",
        "old": "        with outputs.owner_only():\n",
        "new": "        if True:\n",
        "tests": (_RULE + "test_the_key_of_fingerprints_is_its_owners",),
        "why": "whoever has the key can test guesses at the private pairs",
    },
    {
        "name": "release_private_files_readable_by_all",
        "kind": "release",
        "file": _OUTPUTS,
        "old": "    outside = 0o077 if output.owner_only else _umask.outside()\n",
        "new": "    outside = _umask.outside()\n",
        "tests": (
            _RULE + "test_what_is_private_is_its_owners_from_the_first_byte",
            _RULE + "test_reports_are_their_owners_and_not_released",
        ),
        "why": "other users of the machine could read private queries",
    },
    {
        "name": "release_temporary_files_readable_by_all",
        "kind": "release",
        "file": _OUTPUTS,
        "old": "    with owner_only(), files.atomic_directory(directory) as partial:\n",
        "new": "    with files.atomic_directory(directory) as partial:\n",
        "tests": (_RULE + "test_what_is_private_is_its_owners_from_the_first_byte",),
        "why": "a stage takes hours, and its rows are there all the time",
    },
    {
        "name": "release_times_as_they_were",
        "kind": "release",
        "file": _OUTPUTS,
        "old": "        if output.guarantee != PRIVATE:\n",
        "new": "        if False:\n",
        "tests": (_RULE + "test_what_may_be_released_can_be_read_and_tells_no_time",),
        "why": "they tell how long the private stages took",
    },
    {
        "name": "release_times_of_folders_as_they_were",
        "kind": "release",
        "file": _OUTPUTS,
        "old": "        settle(directory)  # a stage that fails has moved them, too\n",
        "new": "        pass\n",
        "tests": (_RULE + "test_what_may_be_released_can_be_read_and_tells_no_time",),
        "why": "a folder's time is when its last stage ended",
    },
    {
        "name": "release_through_a_link_in_a_file_url",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "    path = any_files.without_scheme(place)\n    if not",
        "new": "    path = os.fspath(place)\n    if not",
        "tests": (_RULE + "test_a_file_url_is_a_path_of_this_machine",),
        "why": "a link in a file:// URL is not followed, and TensorFlow follows it",
    },
    {
        "name": "noise_that_float32_rounds_to_zero",
        "kind": "noise",
        "file": "tfdpsq/privacy/spec.py",
        "old": "if self.private and not grid.SMALLEST <= moved <= grid.LARGEST:",
        "new": "if self.secure and not grid.SMALLEST <= moved <= grid.LARGEST:",
        "tests": (
            "tests/privacy/test_spec.py::"
            "test_noise_that_float32_does_not_have_is_refused",
        ),
        "why": "at a clip norm of 2e-38 all noise is 0, and the gradients are not",
    },
    {
        "name": "convert_not_asking_the_source_what_it_states",
        "kind": "release",
        "file": "tfdpsq/run/convert.py",
        "old": "releases.guarantee_of(certificate, os.fspath(directory))",
        "new": "releases.guarantee_of(certificate)",
        "tests": (
            "tests/run/test_convert.py::test_what_is_private_stays_so_in_every_format",
        ),
        "why": "a generator trained on canaries is published under a finite epsilon",
    },
    {
        "name": "convert_drops_the_mark_private",
        "kind": "release",
        "file": "tfdpsq/run/convert.py",
        "old": (
            "    if output.guarantee == releases.PRIVATE or "
            "(certificate and not marked)"
        ),
        "new": "    if certificate is None",
        "tests": (
            "tests/run/test_convert.py::test_what_is_private_stays_so_in_every_format",
        ),
        "why": "converted twice, it is released after all",
    },
    {
        "name": "outputs_hidden_in_a_release",
        "kind": "release",
        "file": _FILE,
        "old": "        if hidden:\n",
        "new": "        if False:\n",
        "tests": (
            _RULE + "test_nothing_in_a_release_is_where_who_lists_it_does_not_look",
        ),
        "why": "who lists a release does not see what was spent for it",
    },
    {
        "name": "private_in_a_release_not_counted",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "    counts = released or not private\n",
        "new": "    counts = not private\n",
        "tests": (
            "tests/run/test_budget.py::"
            "test_everything_finished_below_release_is_counted",
        ),
        "why": "what is released costs nothing if a folder of it is called private",
    },
    {
        "name": "hidden_in_a_release_not_counted",
        "kind": "composition",
        "file": "tfdpsq/run/core/spending.py",
        "old": "releases.UNFINISHED.fullmatch(inside.name)",
        "new": 'inside.name.startswith(".")',
        "tests": (
            "tests/run/test_budget.py::"
            "test_everything_finished_below_release_is_counted",
        ),
        "why": "the same, with a dot before its name",
    },
    {
        "name": "release_links_to_artefacts_not_followed",
        "kind": "release",
        "file": _FILE,
        "old": "    for name in spellings(os.fspath(path)):\n",
        "new": "    for name in (os.path.abspath(path),):\n",
        "tests": (_RULE + "test_links_do_not_hide_what_an_artefact_states",),
        "why": "a link to a private set is released under the certificate in it",
    },
    {
        "name": "release_files_of_artefacts_linked_one_by_one",
        "kind": "release",
        "file": _FILE,
        "old": "            if entry.is_symlink():\n",
        "new": "            if False:\n",
        "tests": (_RULE + "test_links_do_not_hide_what_an_artefact_states",),
        "why": "a directory of links to a private set's files passes for public",
    },
    {
        "name": "filtered_set_without_its_guarantee",
        "kind": "release",
        "file": "tfdpsq/run/filter.py",
        "old": "                guarantee=output.guarantee,\n",
        "new": "",
        "tests": (
            "tests/run/test_filter.py::"
            "test_a_private_set_stays_private_wherever_it_is_copied",
        ),
        "why": "a copy of a private set is released under the certificate in it",
    },
    {
        "name": "guarantee_of_a_set_asked_of_its_stage_alone",
        "kind": "release",
        "file": _FILE,
        "old": '_STATING = (STAGE_FILE, "manifest.json", MARK_FILE)',
        "new": "_STATING = (STAGE_FILE, MARK_FILE)",
        "tests": (
            "tests/run/test_filter.py::"
            "test_a_private_set_stays_private_wherever_it_is_copied",
        ),
        "why": "the stage.json is next to the set, and a copy leaves it behind",
    },
    {
        "name": "canaries_looked_for_next_to_a_link",
        "kind": "release",
        "file": "tfdpsq/run/attacks/canary_set.py",
        "old": "    for place in releases.places_of(pairs):\n",
        "new": "    for place in (pathlib.Path(os.path.abspath(pairs)),):\n",
        "tests": (
            "tests/run/test_canary_pairs.py::test_canaries_are_known_wherever_they_are",
        ),
        "why": "a link to canaries certifies a generator that knows their secrets",
    },
    {
        "name": "canaries_without_a_mark",
        "kind": "release",
        "file": "tfdpsq/run/canaries.py",
        "old": "        write_json(out / canary_set.DATA / releases.MARK_FILE, "
        "canary_set.MARK)\n",
        "new": "",
        "tests": (
            "tests/run/test_canary_pairs.py::test_canaries_are_known_wherever_they_are",
        ),
        "why": "so does a copy of them",
    },
    {
        "name": "whatever_a_stage_made_taken_for_imported_pairs",
        "kind": "release",
        "file": _FILE,
        "old": "        and config.keys() >= _OF_IMPORT\n",
        "new": "",
        "tests": (
            "tests/run/test_import.py::"
            "test_imported_pairs_are_an_input_as_any_private_pairs",
        ),
        "why": "what is made of unprotected outputs would be released",
    },
    {
        "name": "marks_in_imported_pairs_ignored",
        "kind": "release",
        "file": _FILE,
        "old": "        and not any((folder / name).exists() for name in marks)\n",
        "new": "",
        "tests": (
            "tests/run/test_import.py::"
            "test_imported_pairs_are_an_input_as_any_private_pairs",
        ),
        "why": "canaries or a private set in that place pass for raw pairs",
    },
    {
        "name": "values_quoted_by_what_is_tried",
        "kind": "reads",
        "file": "tfdpsq/privacy/trials.py",
        "old": """\
@unquoted_values(
    "the rows tried before the first step could not be computed",
    "Nothing was spent. Check all rows.",
)
""",
        "new": "",
        "tests": (
            "tests/privacy/test_before_spending.py::test_what_is_tried_quotes_no_value_of_a_row",
        ),
        "why": "a private row's value is in a traceback that people send around",
    },
    {
        "name": "number_of_units_told_where_it_is_private",
        "kind": "release",
        "file": "tfdpsq/privacy/plan.py",
        "old": (
            '                    else "the data have more units than '
            'num_units, a bound of "\n'
        ),
        "new": (
            '                    else f"the data have {units} units, '
            'more than num_units, a bound of "\n'
        ),
        "tests": (
            "tests/privacy/test_plan.py::"
            "test_data_that_do_not_fit_the_plan_are_refused",
        ),
        "why": "an error in a log tells how many units there are",
    },
    {
        "name": "steps_follow_from_the_private_number_of_units",
        "kind": "release",
        "file": "tfdpsq/run/finetune.py",
        "old": (
            "        config, private_training.public_n(config, "
            "units.count, units.private)\n"
        ),
        "new": "        config, units.count\n",
        "tests": (
            "tests/run/test_epochs.py::test_steps_of_a_generator_follow_from_its_units",
        ),
        "why": "the certificate's steps tell how many units there are",
    },
    {
        "name": "a_runs_directory_open_to_others",
        "kind": "release",
        "file": "tfdpsq/privacy/loop.py",
        "old": "os.makedirs(directory, mode=0o700, exist_ok=True)",
        "new": "os.makedirs(directory, exist_ok=True)",
        "tests": (
            "tests/privacy/test_before_spending.py::test_what_a_run_keeps_is_its_owners_alone",
        ),
        "why": "the ledger's size and times tell when each step was taken",
    },
    {
        "name": "states_listed_to_others",
        "kind": "release",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)",
        "new": "path.parent.mkdir(parents=True, exist_ok=True)",
        "tests": (
            "tests/privacy/test_before_spending.py::test_what_a_run_keeps_is_its_owners_alone",
        ),
        "why": "names and times of states tell when steps were taken",
    },
    {
        "name": "a_certified_set_taken_for_raw_pairs",
        "kind": "release",
        "file": "tfdpsq/run/core/sources.py",
        "old": (
            "    if (manifest.parent / CERTIFICATE).is_file():\n        return True\n"
        ),
        "new": "",
        "tests": (
            "tests/run/test_odd_records.py::test_a_certified_set_is_none_of_raw_pairs_whatever_its_manifest_says",
        ),
        "why": "one private query may have moved all of its rows",
    },
    {
        "name": "reads_deeper_in_the_private_directory_are_not_stated",
        "kind": "reads",
        "file": "tfdpsq/run/core/records.py",
        "old": ", *sorted(private.rglob(reads.FILE_NAME))]",
        "new": "]",
        "tests": (
            "tests/run/test_histogram.py::"
            "test_reads_of_outputs_deeper_in_the_private_directory_are_stated",
        ),
        "why": "the certificate says that nothing else was read, and it was",
    },
    {
        "name": "a_signal_in_the_last_step_is_forgotten_by_the_next_run",
        "kind": "ledger",
        "file": "tfdpsq/run/devices/preemption.py",
        "old": '        """\n        self.end_if_asked()\n',
        "new": '        """\n',
        "tests": (
            "tests/run/test_strategy.py::"
            "test_a_signal_in_the_last_step_ends_before_the_next_training",
        ),
        "why": "a run that nobody wants any more is paid for",
    },
    {
        "name": "a_signal_in_the_last_step_is_forgotten_by_the_job",
        "kind": "ledger",
        "file": "tfdpsq/run/core/stages.py",
        "old": "            each.notice.end_if_asked()\n",
        "new": "            pass\n",
        "tests": (
            "tests/run/test_strategy.py::"
            "test_a_signal_in_the_last_step_ends_a_job_after_its_stage",
        ),
        "why": "the job goes on for hours after it was asked to end",
    },
    {
        "name": "another_private_directory_is_not_named",
        "kind": "release",
        "file": "tfdpsq/run/forget.py",
        "old": "    made.elsewhere = sorted(_elsewhere(root, own))\n",
        "new": "",
        "tests": (
            "tests/run/test_forget.py::"
            "test_another_private_directory_of_a_stage_is_named",
        ),
        "why": "seeds and key are still there, and the exit status is 0",
    },
    {
        "name": "deep_in_a_forgotten_private_directory_a_stage_goes_on",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "kept = [up for up in place.parents if up.name == PRIVATE_FOLDER]",
        "new": "kept: list[pathlib.Path] = []",
        "tests": (
            "tests/run/test_forget.py::"
            "test_nothing_is_made_in_a_private_directory_that_was_forgotten",
        ),
        "why": "a new key is made where all were to be gone",
    },
    {
        "name": "plain_hashes_of_a_log_beside_a_released_pass",
        "kind": "release",
        "file": "tfdpsq/run/passes/embedding.py",
        "old": "keeps = asked.private or asked.judged is None",
        "new": "keeps = True",
        "tests": (
            "tests/run/test_encode_queries.py::"
            "test_hashes_of_a_log_are_not_kept_where_one_split_of_it_is_public",
        ),
        "why": "who knows all queries but one tests guesses at it",
    },
)
