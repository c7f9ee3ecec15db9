"""Mistakes after which a job pays for its first stages, and a later one refuses."""

_JOB = "tfdpsq/run/pipeline.py"
_DATA = "tfdpsq/run/core/pipeline_data.py"
_SETTINGS = "tfdpsq/run/core/pipeline_checks.py"
_MODULE = "tests/run/test_job_refusals.py::"
_PAID_AGAIN = "a corrected job pays for all of them again"

MUTATIONS = (
    (
        "adapters_are_paid_before_a_generator_is_tried",
        "ledger",
        _JOB,
        "finetune.try_model(self.config.finetune, self.vocabulary, self.start)",
        "pass",
        _MODULE + "test_ends_before_adapters_are_paid",
        _PAID_AGAIN,
    ),
    (
        "more_clusters_than_documents_are_noticed_late",
        "ledger",
        _DATA,
        "clusters > documents",
        "clusters > documents + 1",
        _MODULE + "test_sizes_are_compared_before_the_first_stage",
        _PAID_AGAIN,
    ),
    (
        "a_set_smaller_than_a_batch_is_noticed_late",
        "ledger",
        _DATA,
        'own.documents == "corpus" and batch > written',
        'own.documents == "corpus" and batch > written * 2',
        _MODULE + "test_sizes_are_compared_before_the_first_stage",
        _PAID_AGAIN,
    ),
    (
        "microbatches_that_part_a_user_are_noticed_late",
        "ledger",
        _SETTINGS,
        'if unit == "user" and size % rows:',
        'if unit == "user" and size < rows:',
        _MODULE + "test_microbatches_hold_whole_users",
        _PAID_AGAIN,
    ),
    (
        "hard_negatives_of_other_pairs_are_noticed_late",
        "ledger",
        _DATA,
        "        hard_negatives.origin(negatives, source, pairs)\n",
        "",
        _MODULE + "test_a_run_of_other_pairs_is_refused_before_all",
        _PAID_AGAIN,
    ),
    (
        "a_generator_is_paid_for_a_histogram_that_is_none",
        "ledger",
        "tfdpsq/run/training/context.py",
        "        document_rates.Histogram.load(config.histogram).positive_counts()\n",
        "",
        _MODULE + "test_no_generator_is_paid_for_a_histogram_that_is_none",
        "its set is refused for the histogram that its epsilon was shared with",
    ),
    (
        "another_private_directory_than_the_job_s_is_ignored",
        "release",
        _SETTINGS,
        'given.append("private_directory")',
        "pass",
        _MODULE + "test_places_and_names_are_checked_before_the_first_stage",
        "keys and ledgers lie elsewhere than where the user said",
    ),
    (
        "temperatures_beyond_float32",
        "ledger",
        "tfdpsq/generator/sampling.py",
        "LEAST_TEMPERATURE = 1e-3",
        "LEAST_TEMPERATURE = 1e-30",
        "tests/generator/test_sampling.py::test_settings_out_of_range_are_refused",
        "candidates that were paid for are chosen by queries that are all empty",
    ),
)
