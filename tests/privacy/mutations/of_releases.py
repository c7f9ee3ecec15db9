"""Mistakes that put what is private where things are released."""

_RULE = "tests/run/test_releases.py::"
_FILE = "tfdpsq/run/core/releases.py"
_OUTPUTS = "tfdpsq/run/core/outputs.py"

MUTATIONS = (
    {
        "name": "release_seen_in_the_given_path_alone",
        "file": _FILE,
        "old": "    return any(RELEASE_FOLDER in name.split("
        '"/") for name in spellings(place))\n',
        "new": '    return RELEASE_FOLDER in os.path.abspath(place).split("/")\n',
        "tests": (_RULE + "test_a_path_is_released_however_it_is_spelled",),
        "why": "a link into release/ would take in what is private",
    },
    {
        "name": "release_links_resolved_to_the_last_alone",
        "file": _FILE,
        "old": "    for _ in range(_MOST_LINKS):\n",
        "new": "    for _ in range(1):\n",
        "tests": (_RULE + "test_a_path_is_released_however_it_is_spelled",),
        "why": "a link that leads through release/ to elsewhere is still found there",
    },
    {
        "name": "release_private_directory_inside",
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
        "file": _FILE,
        "old": "        if self.guarantee == PRIVATE and is_released(self.place):\n",
        "new": "        if False:\n",
        "tests": (_RULE + "test_a_path_is_released_however_it_is_spelled",),
        "why": "a generator without protection could be released",
    },
    {
        "name": "release_of_an_infinite_epsilon_called_certified",
        "file": _FILE,
        "old": "    return CERTIFIED if _is_finite(certificate) else PRIVATE\n",
        "new": "    return CERTIFIED\n",
        "tests": (_RULE + "test_the_guarantee_follows_from_certificates_and_marks",),
        "why": "a certificate also says that nothing is protected",
    },
    {
        "name": "release_mark_of_an_input_ignored",
        "file": _FILE,
        "old": "    if any(stated(path) == PRIVATE for path in made_from if path):\n",
        "new": "    if False:\n",
        "tests": (_RULE + "test_the_guarantee_follows_from_certificates_and_marks",),
        "why": "what is trained on canaries would be released with its certificate",
    },
    {
        "name": "release_lineage_not_checked",
        "file": "tfdpsq/run/core/workdir.py",
        "old": "    releases.check_lineage(output, plain(config))\n",
        "new": "",
        "tests": (_RULE + "test_no_stage_can_claim_more_than_what_it_is_made_from",),
        "why": "a stage that states too much would be believed",
    },
    {
        "name": "release_not_checked_after_it_is_made",
        "file": _OUTPUTS,
        "old": "        releases.check_made(partial, output)\n",
        "new": "",
        "tests": (_RULE + "test_what_was_made_must_have_what_was_stated",),
        "why": "a certificate that was not written would not be missed",
    },
    {
        "name": "release_embeddings_of_private_queries_called_public",
        "file": "tfdpsq/privacy/certificate_files.py",
        "old": "    if certificate is None and stated(stage, GUARANTEE) == PRIVATE:\n",
        "new": "    if False:\n",
        "tests": (
            _RULE
            + "test_what_is_private_without_a_certificate_is_not_taken_for_public",
        ),
        "why": "no certificate is how public artefacts look",
    },
    {
        "name": "release_key_readable_by_all",
        "file": "tfdpsq/run/core/sources.py",
        "old": "        with outputs.owner_only():\n",
        "new": "        if True:\n",
        "tests": (_RULE + "test_the_key_of_fingerprints_is_its_owners",),
        "why": "whoever has the key can test guesses at the private pairs",
    },
    {
        "name": "release_private_files_readable_by_all",
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
        "file": _OUTPUTS,
        "old": "    with owner_only(), files.atomic_directory(directory) as partial:\n",
        "new": "    with files.atomic_directory(directory) as partial:\n",
        "tests": (_RULE + "test_what_is_private_is_its_owners_from_the_first_byte",),
        "why": "a stage takes hours, and its rows are there all the time",
    },
    {
        "name": "release_times_as_they_were",
        "file": _OUTPUTS,
        "old": "        if output.guarantee != PRIVATE:\n",
        "new": "        if False:\n",
        "tests": (_RULE + "test_what_may_be_released_can_be_read_and_tells_no_time",),
        "why": "they tell how long the private stages took",
    },
    {
        "name": "release_times_of_folders_as_they_were",
        "file": _OUTPUTS,
        "old": "    settle(directory)\n",
        "new": "",
        "tests": (_RULE + "test_what_may_be_released_can_be_read_and_tells_no_time",),
        "why": "a folder's time is when its last stage ended",
    },
)
