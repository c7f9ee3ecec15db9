"""Mistakes in what trains a map of query embeddings on private pairs."""

_STAGE = "tfdpsq/run/train_adapter.py"
_TRAINING = "tfdpsq/run/training/adapter_training.py"
_JOB = "tfdpsq/run/core/pipeline_data.py"
_SETTINGS = "tfdpsq/run/core/pipeline_checks.py"
_GIVEN = "tfdpsq/run/passes/given_embeddings.py"
_MODULE = "tests/run/test_train_adapter.py::"
_UNIT = _MODULE + "test_one_unit_moves_the_step_by_the_clip_norm"
_REFUSED = _MODULE + "test_refuses_what_its_guarantee_would_not_hold_for"
_LEARNS = _MODULE + "test_learns_the_rotation_and_is_searched_by_the_command"
_CERTIFIED = _MODULE + "test_embeddings_of_a_certified_encoder_are_not_free"
_ENCODERS = _MODULE + "test_queries_by_another_encoder_than_the_documents_are_refused"
_COPIES = (
    _MODULE + "test_copies_and_links_of_our_own_embeddings_say_where_they_are_from"
)
_DAMAGED = _MODULE + "test_damaged_embeddings_are_found_before_a_step_is_paid"
_IN_A_JOB = _MODULE + "test_a_job_refuses_embeddings_before_its_first_stage"
_STATED = _MODULE + "test_what_was_read_and_spent_before_counts"

MUTATIONS = (
    (
        "a_share_of_the_private_number_of_units",
        "sampling",
        _TRAINING,
        "n = private_training.public_n(config, units.count, units.private)",
        "n = units.count",
        _UNIT,
        "batch and certificate follow from how many private units there are",
    ),
    (
        "any_encoder_is_taken_for_public",
        "reads",
        _GIVEN,
        "if not encoder_is_public:",
        "if False:",
        _REFUSED,
        "an encoder that was trained on the queries carries them past the noise",
    ),
    (
        "an_encoder_s_certificate_is_passed_over",
        "composition",
        _GIVEN,
        "if (pathlib.Path(path) / certificate.FILE_NAME).is_file():",
        "if False:",
        _CERTIFIED,
        "the adapter states its own cost, and not that of the encoder it maps",
    ),
    (
        "embeddings_of_a_private_retriever",
        "release",
        _GIVEN,
        "if (problem := sources.why_not_public(path)) is not None:",
        "if (problem := None) is not None:",
        _REFUSED,
        "what follows from an unprotected retriever is released",
    ),
    (
        "embeddings_of_documents_that_are_asked_about",
        "negatives",
        _STAGE,
        "documents.require_all(sources.open_beir(config.pairs).documents(), "
        "config.pairs)",
        "pass",
        _REFUSED,
        "negatives come from the private pairs' documents alone, and tell of them",
    ),
    (
        "embeddings_of_two_encoders",
        "reads",
        _GIVEN,
        "if found[0] != found[1] or bool(documents.stage) != bool(queries.stage):",
        "if found[0][1] != found[1][1]:",
        _ENCODERS,
        "queries by a retriever that learnt from them pass with public documents",
    ),
    (
        "other_queries_next_to_our_documents",
        "reads",
        _GIVEN,
        'if made != texts or "retriever" not in stage.get("inputs", {}):',
        'if "retriever" not in stage.get("inputs", {}):',
        _ENCODERS,
        "queries of any encoder pass for those of the one that made the documents",
    ),
    (
        "queries_of_another_log",
        "composition",
        _STAGE,
        "    queries.require_queries(config.pairs, config.split, private)\n",
        "",
        _MODULE + "test_queries_of_another_log_are_refused",
        "what is learnt from one log is counted for another",
    ),
    (
        "links_to_single_files_of_a_private_index",
        "release",
        _GIVEN,
        'for path in (documents, f"{documents}/{embedding.DOCUMENTS}"):',
        "for path in (documents,):",
        _COPIES,
        "embeddings by an unprotected retriever pass under other names",
    ),
    (
        "damaged_embeddings_are_trained_on",
        "ledger",
        _GIVEN,
        "        self.index.verify()\n",
        "",
        _DAMAGED,
        "a budget is spent on embeddings that were changed",
    ),
    (
        "a_plain_hash_of_private_embeddings",
        "keys",
        _STAGE,
        "sources.keyed_fingerprint(queries.fingerprint, private)",
        "queries.fingerprint",
        _LEARNS,
        "guesses at a query can be tested against the certificate",
    ),
    (
        "an_adapter_forgets_what_was_read_before",
        "reads",
        _STAGE,
        "private_reads=reads",
        "private_reads=[]",
        _STATED,
        "settings chosen on private metrics look as if they were not",
    ),
    (
        "an_adapter_passes_the_limit_on_all_releases",
        "composition",
        _STAGE,
        'spending.require_within({run_dir.name: plan}, inputs["pairs"])',
        "pass",
        _STATED,
        "the budget of the log is overspent",
    ),
    (
        "a_job_s_limit_without_its_adapters",
        "composition",
        _JOB,
        "        plans[name] = _adapter_plan(config, epsilon)\n",
        "        pass\n",
        _IN_A_JOB,
        "a job begins that its budget does not suffice for",
    ),
    (
        "a_job_takes_any_encoder_for_public",
        "reads",
        _SETTINGS,
        "public = config.adapter.encoder_is_public",
        "public = True",
        _IN_A_JOB,
        "generators are paid for before the stage asks for the declaration",
    ),
    (
        "a_job_s_test_queries_may_lack_an_embedding",
        "ledger",
        _JOB,
        "        queries.of(beir.qrels(config.evaluate.split))\n",
        "",
        _IN_A_JOB,
        "a budget is spent on a job that ends in an error",
    ),
)
