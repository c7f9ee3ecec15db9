"""Mistakes in what a method, an output or a choice was derived for."""

MUTATIONS = (
    {
        "name": "certificates_of_two_runs_in_one_output",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "elif len(found) > 1:",
        "new": "elif len(found) > 2:",
        "tests": (
            "tests/run/test_releases.py::"
            "test_two_certificates_in_one_output_are_refused",
        ),
        "why": "two guarantees add up, and each is taken for the whole",
    },
    {
        "name": "certificate_that_is_not_private_called_finite",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": ('return certificate.get("private") is True and math.isfinite(epsilon)'),
        "new": "return math.isfinite(epsilon)",
        "tests": (
            "tests/run/test_releases.py::"
            "test_the_guarantee_follows_from_certificates_and_marks",
        ),
        "why": "a finite epsilon beside private: false counts as a guarantee",
    },
    {
        "name": "file_urls_hide_what_is_private",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "found = _found_at(any_files.without_scheme(path))",
        "new": "found = _found_at(path)",
        "tests": (
            "tests/run/test_lineage_urls.py::"
            "test_a_file_url_does_not_hide_what_is_private",
        ),
        "why": "documents marked private are released as public by their URL",
    },
    {
        "name": "passes_claim_more_than_what_they_are_made_from",
        "kind": "release",
        "file": "tfdpsq/run/passes/sharded_stages.py",
        "old": "    releases.check_lineage(output, workdir.plain(config))\n",
        "new": "",
        "tests": (
            "tests/run/test_lineage_urls.py::"
            "test_synthesize_is_refused_before_it_writes_anything",
        ),
        "why": "queries from documents marked private are released as public",
    },
    {
        "name": "what_other_file_systems_state_not_read",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "        return _stated_elsewhere(path)\n",
        "new": "        return None\n",
        "tests": (
            "tests/run/test_lineage_urls.py::"
            "test_what_a_directory_of_another_file_system_states_is_read",
        ),
        "why": "what is private in a bucket is released as public",
    },
    {
        "name": "marks_above_a_place_of_other_file_systems_not_read",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "for depth in range(len(parts), 0, -1):",
        "new": "for depth in range(len(parts), len(parts) - 1, -1):",
        "tests": (
            "tests/run/test_lineage_urls.py::"
            "test_what_a_directory_of_another_file_system_states_is_read",
        ),
        "why": "a file of what is private in a bucket is released as public",
    },
    {
        "name": "marks_that_cannot_be_read_are_none",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "        if isinstance(error, forbidden) and above:\n",
        "new": "        if not isinstance(error, ValueError):\n",
        "tests": (
            "tests/run/test_lineage_urls.py::"
            "test_a_mark_that_cannot_be_read_is_not_taken_for_none",
        ),
        "why": "a bucket that does not answer lets out what is private as public",
    },
    {
        "name": "damaged_marks_are_none",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "        if isinstance(error, forbidden) and above:\n",
        "new": "        if isinstance(error, ValueError):\n",
        "tests": (
            "tests/run/test_lineage_urls.py::test_a_damaged_mark_is_not_taken_for_none",
        ),
        "why": "documents beside a mark that was cut short are released as public",
    },
    {
        "name": "a_damaged_stage_file_says_nothing_of_its_certificate",
        "kind": "release",
        "file": "tfdpsq/privacy/proof/certificate_files.py",
        "old": "except (FileNotFoundError, NotADirectoryError, IsADirectoryError):",
        "new": "except (OSError, ValueError):",
        "tests": (
            "tests/run/test_lineage_urls.py::test_a_damaged_mark_is_not_taken_for_none",
        ),
        "why": "no certificate beside it is how public artefacts look",
    },
    {
        "name": "settings_in_lists_not_looked_at",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "elif isinstance(config, (list, tuple)):",
        "new": "elif isinstance(config, set):",
        "tests": (
            "tests/run/test_releases.py::"
            "test_no_stage_can_claim_more_than_what_it_is_made_from",
        ),
        "why": "a private artefact in a list of inputs goes unseen",
    },
    {
        "name": "guarantee_of_a_file_not_asked_of_its_stage",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "        for folder in (place, *place.parents):\n            states",
        "new": "        for folder in (place,):\n            states",
        "tests": (
            "tests/run/test_releases.py::"
            "test_no_stage_can_claim_more_than_what_it_is_made_from",
        ),
        "why": "a private stage's file passes for public",
    },
    {
        "name": "private_mark_of_what_it_is_made_from_ignored",
        "kind": "release",
        "file": "tfdpsq/run/core/releases.py",
        "old": "if any(stated(path) == PRIVATE for path in made_from if path):",
        "new": "if not made_from:",
        "tests": (
            "tests/run/test_releases.py::"
            "test_the_guarantee_follows_from_certificates_and_marks",
        ),
        "why": (
            "what depends on private queries without a certificate passes for public"
        ),
    },
    {
        "name": "private_choices_left_open",
        "kind": "release",
        "file": "tfdpsq/run/core/outputs.py",
        "old": "PRIVATE_FOLDERS = (layout.RUNS, layout.LOGS, layout.CHOICES)",
        "new": "PRIVATE_FOLDERS = (layout.RUNS, layout.LOGS)",
        "tests": (
            "tests/run/test_releases.py::"
            "test_a_private_directory_is_closed_and_so_is_what_was_left_open",
        ),
        "why": "everybody may read the scores and generators of a choice",
    },
    {
        "name": "umask_opened_while_somebody_needs_it",
        "kind": "release",
        "file": "tfdpsq/run/core/outputs.py",
        "old": ("            self._depth -= 1\n            if not self._depth:"),
        "new": ("            self._depth -= 1\n            if True:"),
        "tests": (
            "tests/run/test_releases.py::"
            "test_what_is_closed_stays_so_until_the_last_that_needs_it_is_done",
        ),
        "why": "what is written next to another private output is open to all",
    },
    {
        "name": "model_trained_on_canaries_certified",
        "kind": "release",
        "file": "tfdpsq/run/training/context.py",
        "old": "if not chief or canary_set.holds_canaries(pairs):",
        "new": "if not chief:",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_what_is_trained_on_canaries_is_never_certified",
        ),
        "why": "secrets that were planted to be found are released",
    },
    {
        "name": "cosines_beyond_one_let_through",
        "kind": "coefficients",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": (
            "scores = tf.clip_by_value(tf.where(sound, scores, 0.0), -scale, scale)"
        ),
        "new": "scores = tf.where(sound, scores, 0.0)",
        "tests": (
            "tests/retriever/test_direct_methods.py::"
            "test_no_score_counts_beyond_the_scale",
        ),
        "why": "the bound on a column's share is that of scores within the scale",
    },
    {
        "name": "equal_documents_masked_by_logit_dp",
        "kind": "coefficients",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": """\
        return values, tf.reshape(coefficients, [-1]), losses
""",
        "new": """\
        keys, eye = batch["document_key"], tf.eye(rows)
        same = (keys[:, tf.newaxis] == keys[tf.newaxis, :]) & (eye == 0)
        kept = tf.where(same, 0.0, coefficients + eye)
        coefficients = kept / tf.reduce_sum(kept, axis=1, keepdims=True) - eye
        return values, tf.reshape(coefficients, [-1]), losses
""",
        "tests": (
            "tests/retriever/test_direct_methods.py::"
            "test_logit_dp_leaves_no_column_out_of_a_softmax",
        ),
        "why": (
            "few columns share the probability, and one pair takes all of many rows"
        ),
    },
    {
        "name": "groups_read_the_next_groups_documents",
        "kind": "negatives",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": (
            "cosines = tf.matmul(by_group(queries), by_group(documents), "
            "transpose_b=True)"
        ),
        "new": (
            "cosines = tf.matmul(by_group(queries), "
            "tf.roll(by_group(documents), 1, 0), transpose_b=True)"
        ),
        "tests": (
            "tests/retriever/test_direct_methods.py::"
            "test_another_groups_rows_do_not_move",
        ),
        "why": "one pair moves two groups' gradients, at noise for one",
    },
    {
        "name": "vacuous_bound_of_logit_dp_halved",
        "kind": "coefficients",
        "file": "tfdpsq/retriever/direct_dp.py",
        "old": "2 * own + 2 * others / (1 + others * spread)",
        "new": "own + 2 * others / (1 + others * spread)",
        "tests": (
            "tests/retriever/test_direct_methods.py::"
            "test_logit_dps_bound_by_hand_and_where_it_is_vacuous",
        ),
        "why": "the new row's own terms are paid for by half",
    },
    {
        "name": "bidirectional_public_negatives",
        "kind": "negatives",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": '        _one_direction(model, "public_negatives")\n',
        "new": "",
        "tests": (
            "tests/retriever/test_direct_losses.py::"
            "test_what_a_method_is_not_derived_for_is_refused",
        ),
        "why": "queries are scored against each other's, at noise for one",
    },
    {
        "name": "learned_scale_in_logit_dp",
        "kind": "coefficients",
        "file": "tfdpsq/retriever/direct_losses.py",
        "old": "        if model.config.learned_scale:",
        "new": "        if model.config.learned_scale is None:",
        "tests": (
            "tests/retriever/test_direct_losses.py::"
            "test_what_a_method_is_not_derived_for_is_refused",
        ),
        "why": ("the scale grows in training beyond the one that noise was made for"),
    },
    {
        "name": "private_choice_scored_where_rows_round_together",
        "kind": "composition",
        "file": "tfdpsq/run/choose.py",
        "old": 'with tf.device("CPU:0") if private else contextlib.nullcontext():',
        "new": "with contextlib.nullcontext():",
        "tests": (
            "tests/run/test_choose_inside.py::"
            "test_queries_for_a_private_choice_are_written_on_the_cpu",
        ),
        "why": "a query more changes the scores of others by rounding",
    },
)
