"""Mistakes in audits, and in what a job makes and keeps around its training."""

MUTATIONS = (
    {
        "name": "vocabulary_is_learnt_from_queries_too",
        "kind": "release",
        "file": "tfdpsq/run/prepare.py",
        "old": "                (document.content for document in beir.documents()),\n",
        "new": "                [d.content for d in beir.documents()]\n"
        "                + list(beir.queries().values()),\n",
        "tests": (
            "tests/run/test_prepare.py::"
            "test_what_is_released_is_the_same_whatever_people_asked",
        ),
        "why": 'pieces of private queries are released, under the guarantee "public"',
    },
    {
        "name": "fit_compares_the_first_rows_only",
        "kind": "resumes",
        "file": "tfdpsq/privacy/fit_inputs.py",
        "old": "digest.update(np.ascontiguousarray(values).tobytes())",
        "new": "digest.update(np.ascontiguousarray(values[:4]).data)",
        "tests": (
            "tests/privacy/test_fit_inputs.py::"
            "test_a_changed_value_of_any_row_is_other_data",
        ),
        "why": "a killed fit goes on with other rows under the same noise",
    },
    {
        "name": "half_of_the_coins_are_heads",
        "kind": "certificate",
        "file": "tfdpsq/run/canaries.py",
        "old": "heads = random.random(config.coins) < 0.5",
        "new": "heads = random.permutation(config.coins) < config.coins // 2",
        "tests": (
            "tests/run/test_audit_stage.py::test_every_coin_is_thrown_by_itself",
        ),
        "why": "the audit's lower bound is derived for coins that are independent",
    },
    {
        "name": "secrets_follow_from_16_bits",
        "kind": "keys",
        "file": "tfdpsq/run/canaries.py",
        "old": "system_randomness.randbits(256)",
        "new": "system_randomness.randbits(16)",
        "tests": (
            "tests/run/test_audit_stage.py::"
            "test_fresh_secrets_cannot_be_guessed_by_their_seed",
        ),
        "why": "who tries all seeds knows which canaries were put in",
    },
    {
        "name": "attacks_on_one_run_share_nothing",
        "kind": "certificate",
        "file": "tfdpsq/run/audit.py",
        "old": "confidence = 1 - (1 - config.confidence) / len(scores)",
        "new": "confidence = config.confidence",
        "tests": (
            "tests/run/test_audit_stage.py::"
            "test_attacks_on_one_run_share_what_may_be_wrong",
        ),
        "why": "the best of three bounds, each wrong one time in 20, is wrong oftener",
    },
    {
        "name": "audit_takes_a_secrets_pairs_for_one_unit",
        "kind": "certificate",
        "file": "tfdpsq/run/audit.py",
        "old": 'units = 1 if guarantee["unit"] == "user" else repetitions',
        "new": 'units = repetitions if guarantee["unit"] == "query" else 1',
        "tests": (
            "tests/run/test_audit_stage.py::"
            "test_a_guarantee_for_pairs_is_for_one_of_a_secrets_pairs",
        ),
        "why": "what leaks in r pairs is held against the guarantee of one",
    },
    {
        "name": "examples_of_reproduce_are_no_read",
        "kind": "reads",
        "file": "tfdpsq/run/reproduction/reproduce_report.py",
        "old": '    reads.record("some private queries',
        "new": '    max("some private queries',
        "tests": (
            "tests/run/test_reproduce_tables.py::"
            "test_queries_that_are_shown_are_a_recorded_read",
        ),
        "why": "private queries are shown, and no list of reads says so",
    },
    {
        "name": "killed_stage_keeps_its_time",
        "kind": "release",
        "file": "tfdpsq/run/core/workdir.py",
        "old": "        outputs.settle(directory)  # in case the command was killed",
        "new": "        str(directory)  # in case",
        "tests": (
            "tests/run/test_releases.py::"
            "test_a_command_that_was_killed_before_the_last_times_sets_them_again",
        ),
        "why": "times in release/ tell when a private stage ended",
    },
    {
        "name": "optimizer_stays_open_after_a_step",
        "kind": "noise",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "        finally:  # these gradients alone\n"
        "            self._was_dp_gradients_called = False\n",
        "new": "        finally:\n            pass\n",
        "tests": (
            "tests/privacy/test_optimizers.py::"
            "test_a_step_opens_the_optimizer_to_its_own_gradients_alone",
        ),
        "why": "gradients without noise move weights that a certificate is made for",
    },
    {
        "name": "signal_in_a_finaliser_is_lost",
        "kind": "ledger",
        "file": "tfdpsq/run/devices/preemption.py",
        "old": "        if asked and os.getpid() == _PROCESS:\n",
        "new": "        if asked and not _PROCESS:\n",
        "tests": (
            "tests/run/test_console.py::"
            "test_a_signal_while_an_object_is_finalised_is_not_lost",
        ),
        "why": "a job that was asked to end goes on and pays for the next model",
    },
    {
        "name": "moved_paths_are_compared_by_their_last_part",
        "kind": "resumes",
        "file": "tfdpsq/run/core/workdir.py",
        "old": "os.path.relpath(old, before) == os.path.relpath(new, now)",
        "new": "os.path.basename(old) == os.path.basename(new)",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_paths_are_compared_from_where_the_job_was_and_is",
        ),
        "why": "a run goes on with another setting under the ledger of the first",
    },
    {
        "name": "any_path_of_a_moved_job_may_change",
        "kind": "resumes",
        "file": "tfdpsq/run/core/workdir.py",
        "old": "        return new if is_moved else old\n",
        "new": "        return new\n",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_a_job_that_was_moved_or_is_spelled_otherwise_goes_on",
        ),
        "why": "a run goes on with another path of the job under one ledger",
    },
    {
        "name": "texts_of_a_job_that_stayed_count_as_moved",
        "kind": "resumes",
        "file": "tfdpsq/run/core/workdir.py",
        "old": "        if not (os.path.isabs(old) and os.path.isabs(new)):\n",
        "new": "        if old.endswith(new):\n            return new\n        if 0:\n",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_paths_are_compared_from_where_the_job_was_and_is",
        ),
        "why": "a run that is paid for goes on under another prompt",
    },
    {
        "name": "runs_are_open_until_they_are_closed",
        "kind": "release",
        "file": "tfdpsq/run/training/private_training.py",
        "old": "    if directory.parent.name == workdir.RUNS:\n",
        "new": "    if not directory.name:\n",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_a_run_is_closed_from_the_start_whatever_the_private_directory_is_called",
        ),
        "why": "others can put a ledger of theirs where the run's will be",
    },
    {
        "name": "linked_private_directory_stays_open",
        "kind": "release",
        "file": "tfdpsq/run/core/outputs.py",
        "old": "        _close(pathlib.Path(os.path.realpath(directory)))\n",
        "new": "        _close(directory)\n",
        "tests": (
            "tests/run/test_releases.py::"
            "test_a_private_directory_is_closed_and_so_is_what_was_left_open",
        ),
        "why": "others can replace the ledger behind the link",
    },
    {
        "name": "list_of_canaries_may_lose_its_end",
        "kind": "certificate",
        "file": "tfdpsq/run/attacks/canary_set.py",
        "old": "    for name in found.keys() - listed:\n",
        "new": "    for name in listed - found.keys() - listed:\n",
        "tests": (
            "tests/run/test_audit_stage.py::"
            "test_a_list_of_canaries_that_lost_its_end_is_noticed",
        ),
        "why": "secrets that leak are left out of the audit without a word",
    },
    {
        "name": "shards_of_private_passes_are_open",
        "kind": "release",
        "file": "tfdpsq/run/passes/sharded_stages.py",
        "old": "        with outputs.owner_only():\n            return passed()\n",
        "new": "        return passed()\n",
        "tests": (
            "tests/run/test_passes.py::"
            "test_shards_that_wait_for_others_are_their_owners",
        ),
        "why": "rankings for private queries are anybody's until all shards are made",
    },
    {
        "name": "files_beside_the_stages_tell_the_time",
        "kind": "release",
        "file": "tfdpsq/run/core/outputs.py",
        "old": "            finish(partial, output)\n"
        "    finally:\n"
        "        settle(output.directory)\n",
        "new": "            finish(partial, output)\n    finally:\n        pass\n",
        "tests": (
            "tests/run/test_releases.py::"
            "test_a_file_beside_the_stages_leaves_no_time_in_a_released_place",
        ),
        "why": "a folder's time in release/ tells when private queries were measured",
    },
    {
        "name": "equal_certificates_of_two_folders_are_one_run",
        "kind": "composition",
        "file": "tfdpsq/run/budget.py",
        "old": '                composition.require_one_run(release, line["places"])\n',
        "new": "                pass\n",
        "tests": (
            "tests/run/test_budget.py::"
            "test_equal_certificates_of_several_folders_are_one_run_or_refused",
        ),
        "why": "two runs that nobody can tell from copies are counted once",
    },
    {
        "name": "total_of_a_stopped_run_has_no_condition",
        "kind": "composition",
        "file": "tfdpsq/run/budget.py",
        "old": '    if total["stopped_early"]:\n        conditions',
        "new": "    if False:\n        conditions",
        "tests": (
            "tests/run/test_budget.py::"
            "test_the_total_of_a_run_that_stopped_early_has_its_condition",
        ),
        "why": "a total is stated that holds only if nobody looked before the stop",
    },
    {
        "name": "promise_forgets_how_the_start_was_chosen",
        "kind": "certificate",
        "file": "tfdpsq/run/reporting/certificates_in_words.py",
        "old": "chain = (certificate, *parents_of(certificate))",
        "new": "chain = (certificate,)",
        "tests": (
            "tests/run/test_report_certificates.py::"
            "test_a_run_chosen_among_several_says_so_and_what_is_not_covered",
        ),
        "why": "held-out queries are promised what only trained ones have",
    },
    {
        "name": "card_of_a_private_set_does_not_say_so",
        "kind": "release",
        "file": "tfdpsq/run/reporting/data_card.py",
        "old": 'it says so."] if private else []',
        "new": 'it says so."] if 0 else []',
        "tests": (
            "tests/run/test_report_certificates.py::"
            "test_a_sets_card_says_what_its_certificate_says",
        ),
        "why": "a set of a model that was trained on canaries reads as one for release",
    },
    {
        "name": "card_leaves_out_what_is_not_covered",
        "kind": "certificate",
        "file": "tfdpsq/run/reporting/data_card.py",
        "old": '((manifest.get("certificate") or {}).get("not_covered", ()))]',
        "new": "()]",
        "tests": (
            "tests/run/test_report_certificates.py::"
            "test_a_sets_card_says_what_its_certificate_says",
        ),
        "why": "the card promises more than the certificate beside it",
    },
    {
        "name": "card_leaves_out_the_reads_of_training",
        "kind": "reads",
        "file": "tfdpsq/run/reporting/data_card.py",
        "old": "[*(found if isinstance(found, list) else [found]), *made_by_reading]",
        "new": "[*made_by_reading]",
        "tests": (
            "tests/run/test_report_certificates.py::"
            "test_a_sets_card_says_what_its_certificate_says",
        ),
        "why": "the card says that epsilon covers every read, and losses were shown",
    },
    {
        "name": "warnings_are_not_in_words",
        "kind": "certificate",
        "file": "tfdpsq/run/reporting/certificates_in_words.py",
        "old": '        shown["Warnings"] = certificate["warnings"]\n',
        "new": "        pass\n",
        "tests": (
            "tests/run/test_report_certificates.py::"
            "test_certificate_in_words_carries_the_certificates_numbers",
        ),
        "why": "the report does not say that a run stopped early",
    },
    {
        "name": "gathers_along_another_axis_are_alike",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": ' or tf.make_ndarray(axis.attr["value"].tensor) != 0',
        "new": "",
        "tests": (
            "tests/privacy/test_computation.py::"
            "test_rows_of_another_axis_are_told_apart",
        ),
        "why": "a run goes on with another loss, whose steps it did not pay for",
    },
    {
        "name": "lists_that_lost_their_tail_are_the_same",
        "kind": "resumes",
        "file": "tfdpsq/run/core/workdir.py",
        "old": "            others += [None] * (len(old) - len(others))\n",
        "new": "",
        "tests": (
            "tests/run/test_run_directory.py::test_lists_of_other_lengths_differ",
        ),
        "why": "a run goes on with fewer trained weights than it was paid for",
    },
    {
        "name": "texts_pass_for_moved_paths",
        "kind": "resumes",
        "file": "tfdpsq/run/core/workdir.py",
        "old": "if not (os.path.isabs(old) and os.path.isabs(new)):",
        "new": "if False:",
        "tests": (
            "tests/run/test_run_directory.py::test_texts_are_no_moved_paths_wherever_the_command_is_given",
        ),
        "why": "a run goes on with another prompt",
    },
    {
        "name": "an_edited_config_passes_for_the_stages",
        "kind": "release",
        "file": "tfdpsq/run/core/workdir.py",
        "old": 'if not changed and found["fingerprint"] == _fingerprint(of):',
        "new": "if not changed:",
        "tests": (
            "tests/run/test_run_directory.py::test_a_config_that_was_edited_after_the_stage_is_another",
        ),
        "why": "an output is taken for one of another config",
    },
    {
        "name": "users_are_split_by_their_queries",
        "kind": "release",
        "file": "tfdpsq/data/importing.py",
        "old": "name = entry.user if by_user else entry.query",
        "new": "name = entry.query",
        "tests": (
            "tests/run/test_import.py::test_a_user_more_changes_no_other_users_rows",
        ),
        "why": "a user of the training pairs is in the test queries, too",
    },
    {
        "name": "ids_of_24_bits",
        "kind": "sampling",
        "file": "tfdpsq/data/importing.py",
        "old": "_DIGITS = 24",
        "new": "_DIGITS = 6",
        "tests": (
            "tests/run/test_import.py::test_ids_are_long_enough_that_none_is_shared",
        ),
        "why": "rows are dropped because of other users' rows",
    },
    {
        "name": "owners_by_another_field_are_those_of_the_first",
        "kind": "sampling",
        "file": "tfdpsq/data/pair_table.py",
        "old": '        self._store.execute("delete from users")\n',
        "new": "",
        "tests": ("tests/data/test_beir.py::test_owners_by_another_field_are_its_own",),
        "why": "one unit is several users, or a part of one",
    },
    {
        "name": "vectors_that_a_kill_left_are_not_verified",
        "kind": "resumes",
        "file": "tfdpsq/retriever/stored_pairs.py",
        "old": "    store.verify()\n    if len(store) != count:",
        "new": "    if len(store) != count:",
        "tests": (
            "tests/retriever/test_stored_pairs.py::test_embedded_rows_are_those_of_memory",
        ),
        "why": "damaged vectors are trained on in steps that were paid for",
    },
    {
        "name": "vectors_that_a_kill_left_are_of_other_documents",
        "kind": "resumes",
        "file": "tfdpsq/retriever/stored_pairs.py",
        "old": "            _require_documents(store, keys)\n",
        "new": "",
        "tests": (
            "tests/retriever/test_stored_pairs.py::"
            "test_vectors_of_other_documents_are_not_used",
        ),
        "why": "a row would learn from another's document, and one pair move many rows",
    },
    {
        "name": "a_documents_vector_depends_on_its_batch",
        "kind": "resumes",
        "file": "tfdpsq/retriever/stored_pairs.py",
        "old": '"document", _BATCH, trim=False)',
        "new": '"document", _BATCH)',
        "tests": (
            "tests/retriever/test_stored_pairs.py::"
            "test_one_row_more_changes_no_other_documents_vector",
        ),
        "why": "one pair would move the rows of others, if by rounding alone",
    },
    {
        "name": "gradients_of_identities_are_not_compared",
        "kind": "resumes",
        "file": "tfdpsq/privacy/computation.py",
        "old": 'return node.op == "Identity" and _GRADIENT not in node.attr',
        "new": 'return node.op == "Identity"',
        "tests": (
            "tests/privacy/test_computation.py::test_an_identity_whose_gradient_is_another_counts",
        ),
        "why": "a run goes on with another gradient under the same noise",
    },
)
