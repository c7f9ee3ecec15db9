"""Mistakes in what is paid for, added up and certified."""

MUTATIONS = (
    {
        "name": "adapters_certificate_without_the_weights",
        "kind": "composition",
        "file": "tfdpsq/run/train_adapter.py",
        "old": '"weights": digest_of_weights(model.weights),',
        "new": '"weights": "",',
        "tests": (
            "tests/run/test_train_adapter.py::"
            "test_one_unit_moves_the_step_by_the_clip_norm",
        ),
        "why": "two adapters from a copied directory count as one run",
    },
    {
        "name": "users_by_their_spelling",
        "kind": "sampling",
        "file": "tfdpsq/data/beir_lines.py",
        "old": "found.add(id_of(value, of_user=True))",
        "new": "found.add(str(value))",
        "tests": (
            "tests/run/test_import_ids.py::"
            "test_spellings_of_a_user_are_one_person_in_a_beir_directory",
        ),
        "why": "a person with two spellings is two units, and so has twice the epsilon",
    },
    {
        "name": "persons_without_a_name_are_one_user",
        "kind": "sampling",
        "file": "tfdpsq/data/texts.py",
        "old": 'text = "" if text in _MISSING else text',
        "new": "pass",
        "tests": (
            "tests/data/test_beir.py::test_a_query_that_is_nobodys_or_twos_is_named",
        ),
        "why": "one of them more moves what is clipped together by twice the clip norm",
    },
    {
        "name": "a_certified_epsilon_is_rounded_down",
        "kind": "release",
        "file": "tfdpsq/run/reporting/wording.py",
        "old": "decimal.ROUND_CEILING",
        "new": "decimal.ROUND_HALF_EVEN",
        "tests": (
            "tests/run/test_report_evidence.py::"
            "test_bounds_are_rounded_to_the_side_on_which_they_hold",
        ),
        "why": "card and report promise a smaller epsilon than the certificate",
    },
    {
        "name": "certificate_without_the_weights",
        "kind": "composition",
        "file": "tfdpsq/privacy/model.py",
        "old": '"weights": ran.digest,',
        "new": '"weights": "",',
        "tests": (
            "tests/privacy/test_model_certificate.py::"
            "test_it_states_what_ran_and_anyone_can_recompute_it",
        ),
        "why": (
            "a copied directory that is continued on other devices has the same noise, "
            "and both models count as one"
        ),
    },
    {
        "name": "overlap_with_a_private_tfds_set_is_public",
        "kind": "release",
        "file": "tfdpsq/run/overlap.py",
        "old": 'part.name.startswith(f"{text_corpus.TFDS}beir_directory/")',
        "new": 'part.name.startswith("beir_directory/")',
        "tests": (
            "tests/run/test_overlap_stage.py::"
            "test_a_tfds_set_of_private_pairs_is_no_public_text",
        ),
        "why": "what occurs in private queries is told under release/",
    },
    {
        "name": "overlap_looks_at_names_instead_of_places",
        "kind": "release",
        "file": "tfdpsq/run/overlap.py",
        "old": "sources.why_not_public(part.place)",
        "new": "sources.why_not_public(part.name)",
        "tests": (
            "tests/run/test_overlap_stage.py::"
            "test_a_tfds_set_of_private_pairs_is_no_public_text",
        ),
        "why": "a TFDS set has a name that is no path",
    },
    {
        "name": "rounding_errors_of_rdp_not_added",
        "kind": "composition",
        "file": "tfdpsq/privacy/accounting.py",
        "old": "return known + sampled * rounding",
        "new": "return known",
        "tests": (
            "tests/privacy/test_accounting.py::"
            "test_rounding_never_makes_epsilon_by_rdp_too_small[1e-12-20.0-1e-06]",
        ),
        "why": "a divergence of 1e-15 is computed as 0, and so is ε of any steps",
    },
    {
        "name": "steps_executed_instead_of_paid",
        "kind": "ledger",
        "file": "tfdpsq/privacy/loop.py",
        "old": (
            "executed = done if kept is None else max(done, kept.ledger.steps_paid)"
        ),
        "new": "executed = done",
        "tests": (
            "tests/privacy/test_paid_steps.py::"
            "test_steps_paid_by_a_killed_run_count_though_they_are_not_repeated",
        ),
        "why": (
            "steps that a killed run showed, and that were not repeated, "
            "count for nothing"
        ),
    },
    {
        "name": "number_of_units_not_in_the_data",
        "kind": "ledger",
        "file": "tfdpsq/privacy/training.py",
        "old": "digest = hashlib.sha256(repr(units).encode())",
        "new": "digest = hashlib.sha256()",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_a_run_goes_on_with_what_its_paid_steps_were_made_with[units]",
        ),
        "why": ("half a run on n units and half on fewer is in no certificate"),
    },
    {
        "name": "ledger_of_a_private_run_wiped",
        "kind": "ledger",
        "file": "tfdpsq/privacy/loop.py",
        "old": "repeats = not plan.spec.private and not",
        "new": "repeats = not",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_a_finished_run_is_not_paid_for_by_its_own_ledger_again",
        ),
        "why": ("a finished run is done again at no price"),
    },
    {
        "name": "ledgers_head_not_compared",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/verification.py",
        "old": """\
        ("ledger_head", ledger.head, "the ledger's last line is"),
""",
        "new": "",
        "tests": (
            "tests/privacy/test_verification.py::"
            "test_only_the_ledger_tells_a_consistent_forgery",
        ),
        "why": (
            "a certificate passes beside the ledger of another run of the same plan"
        ),
    },
    {
        "name": "smaller_epsilon_of_two_accountants",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": '"epsilon": json_number(epsilons[spec.accountant]),',
        "new": '"epsilon": json_number(min(epsilons.values())),',
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_it_says_what_was_guaranteed_and_by_what",
        ),
        "why": (
            "choosing the accountant afterwards is not what was calibrated and stated"
        ),
    },
    {
        "name": "private_reads_outside_the_digest",
        "kind": "certificate",
        "file": "tfdpsq/privacy/proof/certificate.py",
        "old": 'if key != "digest"}',
        "new": 'if key not in ("digest", "private_reads")}',
        "tests": (
            "tests/privacy/test_certificate.py::"
            "test_it_is_plain_json_and_the_digest_is_of_all_of_it",
            "tests/privacy/test_verification.py::"
            "test_every_edit_of_any_entry_is_found_and_nearly_all_without_the_digest",
        ),
        "why": ("the list of what no ε covers can be emptied unseen"),
    },
    {
        "name": "guarantee_of_a_retrievers_start_forgotten",
        "kind": "certificate",
        "file": "tfdpsq/run/train_retriever.py",
        "old": (
            "            certificate = "
            "certificates.inherited_certificate(source.certificate, parent)"
        ),
        "new": "            certificate = source.certificate",
        "tests": (
            "tests/run/test_lineage.py::"
            "test_a_retriever_inherits_from_its_starting_weights_too",
        ),
        "why": (
            "weights that private queries had a part in are released as public ones"
        ),
    },
    {
        "name": "retriever_trained_directly_from_private_weights",
        "kind": "certificate",
        "file": "tfdpsq/run/train_retriever.py",
        "old": (
            '    if config.method != "plain":\n        continuing.require_continuable('
        ),
        "new": ('    if config.method == "":\n        continuing.require_continuable('),
        "tests": (
            "tests/run/test_lineage.py::"
            "test_a_retriever_inherits_from_its_starting_weights_too",
        ),
        "why": ("ε counts the steps of one training where two looked at the queries"),
    },
    {
        "name": "truncation_not_taken_off_delta",
        "kind": "composition",
        "file": "tfdpsq/privacy/plan.py",
        "old": (
            "left = delta - sum(plan.truncation_delta(steps) for plan, steps in runs)"
        ),
        "new": "left = delta",
        "tests": (
            "tests/privacy/test_plan.py::"
            "test_epsilon_is_of_what_truncation_leaves_of_delta",
        ),
        "why": ("δ is spent twice: on the batches cut off, and on the noise"),
    },
    {
        "name": "truncation_off_by_one",
        "kind": "composition",
        "file": "tfdpsq/privacy/accounting.py",
        "old": (
            "scipy.stats.binom.sf(max_batch_size - 1, n - 1, sampling_probability)"
        ),
        "new": "scipy.stats.binom.sf(max_batch_size, n - 1, sampling_probability)",
        "tests": (
            "tests/privacy/test_plan.py::"
            "test_epsilon_is_of_what_truncation_leaves_of_delta",
        ),
        "why": ("a batch that is just full loses a unit to the one that is added"),
    },
    {
        "name": "truncation_of_one_run_of_a_grid",
        "kind": "composition",
        "file": "tfdpsq/privacy/plan.py",
        "old": (
            "left = delta - sum(plan.truncation_delta(steps) for plan, steps in runs)"
        ),
        "new": "left = delta - runs[0][0].truncation_delta(runs[0][1])",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_the_truncation_of_every_run_is_taken_off_delta",
        ),
        "why": ("every run cuts off batches of its own"),
    },
    {
        "name": "equal_runs_of_a_grid_counted_once",
        "kind": "composition",
        "file": "tfdpsq/privacy/plan.py",
        "old": "times[plan.noise_multiplier, probability] += releases",
        "new": "times[plan.noise_multiplier, probability] = releases",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_the_runs_cost_what_the_library_composes[rdp]",
        ),
        "why": ("ten learning rates would cost what one does"),
    },
    {
        "name": "delta_of_the_worst_artefact_alone",
        "kind": "composition",
        "file": "tfdpsq/run/reporting/certificates_in_words.py",
        "old": """\
    delta = sum(float(certificate["guarantee"]["delta"]) for certificate in private)
""",
        "new": """\
    delta = max(float(certificate["guarantee"]["delta"]) for certificate in private)
""",
        "tests": (
            "tests/run/test_report_certificates.py::"
            "test_releasing_several_artefacts_adds_up",
        ),
        "why": ("δ adds up as ε does"),
    },
    {
        "name": "every_draw_has_one_name",
        "kind": "composition",
        "file": "tfdpsq/run/choose.py",
        "old": '"draw": secrets.token_hex(16),',
        "new": '"draw": "0" * 32,',
        "tests": (
            "tests/run/test_choose_inside.py::test_every_draw_has_a_name_of_its_own",
        ),
        "why": "copies of a workdir draw twice, and `budget` counts one choice",
    },
    {
        "name": "draws_name_left_out_of_the_certificate",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": '**({"draw": selection.draw} if selection.draw else {}),',
        "new": "",
        "tests": (
            "tests/privacy/test_budget.py::"
            "test_two_draws_among_the_same_runs_cost_two_choices",
        ),
        "why": "two draws of the same run have equal certificates, and count as one",
    },
    {
        "name": "runs_of_one_ledger_in_a_selection",
        "kind": "composition",
        "file": "tfdpsq/privacy/proof/selection.py",
        "old": "        self._require_ledgers_of_their_own()\n",
        "new": "        pass\n",
        "tests": (
            "tests/privacy/test_selection.py::"
            "test_two_runs_of_one_ledger_are_no_selection",
        ),
        "why": "a forger states one head for all runs, and composition counts one",
    },
    {
        "name": "import_replaces_what_is_no_text_in_an_id",
        "kind": "sampling",
        "file": "tfdpsq/data/texts.py",
        "old": '        value = value.decode("utf-8")\n',
        "new": "        value = text_of(value)\n",
        "tests": ("tests/run/test_import_ids.py::test_ids_in_bytes_are_texts_or_none",),
        "why": "a query more drops another one, whose id has the same replacement",
    },
    {
        "name": "import_takes_caches_of_a_set_for_its_rows",
        "kind": "sampling",
        "file": "tfdpsq/data/tables.py",
        "old": "        found = _of_hugging_face(table) or found\n",
        "new": "        _of_hugging_face(table)\n",
        "tests": (
            "tests/run/test_import.py::"
            "test_caches_next_to_a_hugging_face_set_are_not_of_it",
        ),
        "why": "a query is two units, of which each has the whole epsilon",
    },
    {
        "name": "an_id_of_several_users_is_the_firsts",
        "kind": "reads",
        "file": "tfdpsq/data/importing.py",
        "old": 'query_id = f"{query_id}-{_hash(query_id, user)}"',
        "new": "pass",
        "tests": (
            "tests/run/test_import.py::"
            "test_a_user_more_changes_no_other_users_rows[query-of texts]",
        ),
        "why": "without the first user, the next one's rows are there: two users move",
    },
    {
        "name": "one_query_of_each_type_of_its_id",
        "kind": "reads",
        "file": "tfdpsq/data/texts.py",
        "old": "    return str(int(value))\n",
        "new": "    return str(value)\n",
        "tests": (
            "tests/run/test_import_ids.py::"
            "test_ids_of_documents_and_queries_are_one_in_every_spelling",
        ),
        "why": "an epsilon of queries holds for each of the several that one becomes",
    },
    {
        "name": "one_person_is_two_by_two_zeros",
        "kind": "reads",
        "file": "tfdpsq/data/texts.py",
        "old": r"(\d+)(\.0*)?",
        "new": r"(\d+)(\.0)?",
        "tests": (
            "tests/run/test_import_ids.py::"
            "test_a_person_is_one_user_in_whatever_type_the_id_is",
        ),
        "why": "7.00 is another user than 7.0",
    },
    {
        "name": "one_person_is_two_by_rounding",
        "kind": "reads",
        "file": "tfdpsq/data/texts.py",
        "old": "if (_EXPONENT if of_user else _ROUNDED).fullmatch(text):",
        "new": "if not text.isascii():",
        "tests": (
            "tests/run/test_import_ids.py::test_a_large_number_that_lost_digits_is_no_id",
        ),
        "why": "what pandas wrote next to a missing user is one more user of a person",
    },
    {
        "name": "a_missing_user_is_a_user",
        "kind": "reads",
        "file": "tfdpsq/data/texts.py",
        "old": "    if value is None or value != value:\n",
        "new": "    if value is None:\n",
        "tests": (
            "tests/run/test_import_ids.py::"
            "test_a_person_is_one_user_in_whatever_type_the_id_is",
        ),
        "why": "rows without an id count as one more user of their own",
    },
    {
        "name": "one_person_is_a_user_of_each_spelling",
        "kind": "reads",
        "file": "tfdpsq/data/texts.py",
        "old": "return _one_spelling(text, of_user)",
        "new": "return text",
        "tests": (
            "tests/run/test_import_ids.py::"
            "test_a_person_is_one_user_in_whatever_type_the_id_is",
        ),
        "why": "the same of ids in text files",
    },
    {
        "name": "a_query_is_in_as_many_rows_as_it_has_documents",
        "kind": "sampling",
        "file": "tfdpsq/data/pair_table.py",
        "old": "        if best:\n",
        "new": "        if False:\n",
        "tests": (
            "tests/data/test_beir.py::test_pairs_on_disk_are_those_of_a_naive_join[True]",
        ),
        "why": "a query of k documents moves the sum by k·C, and C is accounted for",
    },
    {
        "name": "each_query_a_user_of_its_own",
        "kind": "sampling",
        "file": "tfdpsq/data/pair_table.py",
        "old": "dense_rank() over (order by user)",
        "new": "dense_rank() over (order by id)",
        "tests": (
            "tests/data/test_beir.py::test_pairs_on_disk_are_those_of_a_naive_join[True]",
        ),
        "why": "an epsilon said to be for users would be for single queries",
    },
    {
        "name": "sets_imported_through_tfds",
        "kind": "composition",
        "file": "tfdpsq/run/import.py",
        "old": ' and "/beir_directory/" in path',
        "new": " and not path",
        "tests": ("tests/run/test_import.py::test_tfds_does_not_launder_a_set",),
        "why": "one private query had a part in all rows, and each is taken for a unit",
    },
    {
        "name": "private_texts_joined_in_a_file",
        "kind": "keys",
        "file": "tfdpsq/data/pair_table.py",
        "old": 'sqlite3.connect("", ',
        "new": 'sqlite3.connect(f"{id(schema)}.sqlite", ',
        "tests": (
            "tests/data/test_beir.py::"
            "test_pairs_larger_than_the_cache_have_no_name_on_disk",
        ),
        "why": "private queries stay behind in a file where anybody may look",
    },
    {
        "name": "names_of_a_ledger_in_the_page_cache",
        "kind": "ledger",
        "file": "tfdpsq/privacy/proof/append_only.py",
        "old": ("    _flush(path.parent)\n    return descriptor\n"),
        "new": "    return descriptor\n",
        "tests": (
            "tests/privacy/test_append_only.py::"
            "test_a_paid_step_is_on_the_device_before_its_update",
        ),
        "why": "after a power failure there is no ledger, and an update that "
        "nobody paid for",
    },
)
