"""Mistakes in secure mode: its keys, its exact draws, its grid, its claims."""

_TESTS = "tests/privacy/"
_SECURE = _TESTS + "test_secure.py::"
_SAMPLES = _TESTS + "test_statistics_sampling.py::"
_SOURCE = "tfdpsq/privacy/randomness/secure.py"
_GRID = "tfdpsq/privacy/randomness/grid.py"
_OTHERS_STREAM = "test_no_secure_draw_has_its_random_numbers_from_anothers_stream"
_NEIGHBOURS = _SECURE + "test_neighbours_on_the_grid_are_no_further_apart_than_stated"
_EXACT_SUM = _SECURE + "test_the_noised_sum_is_the_rounded_one_plus_the_noise_exactly"
_GIVEN_AWAY = (
    _SECURE + "test_what_tensorflow_is_given_is_of_no_key_that_noise_or_samples_have"
)
_RULES = _SECURE + "test_what_training_adds_is_on_the_grid"

MUTATIONS = (
    {
        "name": "secure_nonce_reused_across_steps",
        "kind": "secure",
        "file": _GRID,
        "old": 'source.stream("noise", step, position)',
        "new": 'source.stream("noise", 0, position)',
        "tests": (_RULES,),
        "why": "the difference of two steps has no noise at all",
    },
    {
        "name": "secure_nonce_reused_across_variables",
        "kind": "secure",
        "file": _GRID,
        "old": 'source.stream("noise", step, position)',
        "new": 'source.stream("noise", step)',
        "tests": (_RULES,),
        "why": "the difference of two variables' sums has no noise at all",
    },
    {
        "name": "secure_nonce_without_its_upper_bytes",
        "kind": "secure",
        "file": _SOURCE,
        "old": 'step.to_bytes(8, "little")',
        "new": '(step % (1 << 32)).to_bytes(8, "little")',
        "tests": (_SECURE + "test_streams_repeat_and_no_two_are_alike",),
        "why": "long runs repeat their noise",
    },
    {
        "name": "secure_key_constant",
        "kind": "secure",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "            self._source = SecureSource(noise_seed)\n",
        "new": "            self._source = SecureSource(0)\n",
        "tests": (_SECURE + "test_fresh_optimizers_and_samplers_share_nothing",),
        "why": "whoever reads the source can subtract the noise",
    },
    {
        "name": "secure_sampler_key_constant",
        "kind": "secure",
        "file": "tfdpsq/privacy/plan.py",
        "old": "SecureSource(fresh_seed(secure=True) if seed is None else seed)",
        "new": "SecureSource(seed or 0)",
        "tests": (_SECURE + "test_fresh_optimizers_and_samplers_share_nothing",),
        "why": "amplification by sampling counts on nobody knowing who is drawn",
    },
    {
        "name": "secure_key_of_128_bits",
        "kind": "secure",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "secrets.randbits(KEY_BITS if secure else 128)",
        "new": "secrets.randbits(128)",
        "tests": (
            _SECURE + "test_fresh_keys_have_256_bits_and_are_kept_like_other_seeds",
        ),
        "why": "the certificate says 256",
    },
    {
        "name": "secure_purposes_share_a_key",
        "kind": "secure",
        "file": _SOURCE,
        "old": "info=_LABEL + purpose.encode()",
        "new": "info=_LABEL",
        "tests": (_SECURE + "test_keys_of_purposes_are_derived_by_hkdf",),
        "why": "samples and the first variable's noise come from the same words",
    },
    {
        "name": "secure_dropout_from_the_key_of_noise",
        "kind": "secure",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": 'self._source.seed("dropout")',
        "new": 'self._source.seed("noise")',
        "tests": (_GIVEN_AWAY,),
        "why": "half the key of the noise is in dumps and profiles of graphs",
    },
    {
        "name": "secure_global_seed_from_the_key_of_samples",
        "kind": "secure",
        "file": "tfdpsq/privacy/training.py",
        "old": 'SecureSource(seed).seed("global")',
        "new": 'SecureSource(seed).seed("units")',
        "tests": (_GIVEN_AWAY,),
        "why": "TensorFlow's global seed reveals bits of the sampling key",
    },
    {
        "name": "secure_dealing_from_the_samples_stream",
        "kind": "secure",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": '_PURPOSES = ("units", "rows", "epoch", "dealing")',
        "new": '_PURPOSES = ("units", "rows", "epoch", "units")',
        "tests": (_SAMPLES + _OTHERS_STREAM,),
        "why": "which group a unit is dealt to tells of other units' coins",
    },
    {
        "name": "secure_rounding_dropped",
        "kind": "secure",
        "file": _GRID,
        "old": """\
        scaled = tf.clip_by_value(scaled, -_LARGEST_SUM, _LARGEST_SUM)
        total = tf.cast(scaled, tf.int64) + integers
""",
        "new": """\
        scaled = value * tf.constant(1 / step, value.dtype)
        total = scaled + tf.cast(integers, value.dtype)
""",
        "tests": (_EXACT_SUM,),
        "why": "low-order bits of what is released depend on the sum",
    },
    {
        "name": "secure_noise_rounded_towards_zero",
        "kind": "secure",
        "file": _GRID,
        "old": "rounded = ((bits >> np.uint64(62 - self._shift)) + np.uint64(1)) >> "
        "np.uint64(1)",
        "new": "rounded = bits >> np.uint64(63 - self._shift)",
        "tests": (_SECURE + "test_every_integer_has_its_own_probability",),
        "why": "zero has twice its probability, which is no rounded Gaussian",
    },
    {
        "name": "secure_sensitivity_without_rounding",
        "kind": "secure",
        "file": "tfdpsq/privacy/plan.py",
        "old": "of_sum if self.grid_step is None else of_sum * (1 + grid.ROUNDING)",
        "new": "of_sum",
        "tests": (_NEIGHBOURS,),
        "why": "rounded sums of neighbours are further apart than the noise is for",
    },
    {
        "name": "secure_grid_too_coarse",
        "kind": "secure",
        "file": _GRID,
        "old": "_STEP_BITS = 36",
        "new": "_STEP_BITS = 30",
        "tests": (_NEIGHBOURS,),
        "why": "rounding many weights moves the sum by more than is accounted for",
    },
    {
        "name": "secure_proposals_always_accepted",
        "kind": "secure",
        "file": _GRID,
        "old": "        accepted = gap < 0\n",
        "new": "        accepted = gap < 2\n",
        "tests": (_SECURE + "test_floats_decide_as_exact_arithmetic_does",),
        "why": "the noise has steps where the Gaussian has a slope",
    },
    {
        "name": "secure_doubts_not_decided",
        "kind": "secure",
        "file": _GRID,
        "old": "np.flatnonzero(np.abs(gap) < _MARGIN).tolist()",
        "new": "()",
        "tests": (_SECURE + "test_what_64_bits_leave_open_further_bits_decide",),
        "why": "floating point decides again, and the law is no longer exact",
    },
    {
        "name": "secure_noise_of_one_sign",
        "kind": "secure",
        "file": _GRID,
        "old": "np.where(place > _LOW, -magnitude, magnitude)",
        "new": "magnitude",
        "tests": (_SECURE + "test_every_integer_has_its_own_probability",),
        "why": "half a Gaussian protects from nothing",
    },
    {
        "name": "secure_coins_modulo_without_rejection",
        "kind": "secure",
        "file": _SOURCE,
        "old": "while (beyond := np.flatnonzero(found > most)).size:",
        "new": "while (beyond := np.flatnonzero(found > most)).size < 0:",
        "tests": (_SECURE + "test_integers_are_uniform",),
        "why": "some groups are dealt to more often than others",
    },
    {
        "name": "secure_draws_in_order",
        "kind": "secure",
        "file": _SOURCE,
        "old": "return units[self.order(len(units))][:most]",
        "new": "return units[:most]",
        "tests": (
            _SAMPLES + "test_truncation_keeps_a_uniformly_random_subset[1-True]",
        ),
        "why": "truncation would always leave out the same units",
    },
    {
        "name": "secure_step_without_noise",
        "kind": "secure",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": "            if len(noise) != len(sums):\n",
        "new": "            if len(noise) > len(sums):\n",
        "tests": (_SECURE + "test_a_step_without_noise_is_refused",),
        "why": "a loop of one's own that forgets the noise releases bare sums",
    },
    {
        "name": "secure_claim_of_a_default_run",
        "kind": "secure",
        "file": "tfdpsq/privacy/proof/certificate_randomness.py",
        "old": '            "secure": False,\n',
        "new": '            "secure": True,\n',
        "tests": (
            _SECURE + "test_the_certificate_says_what_is_secure_and_what_is_not",
        ),
        "why": "the certificate claims protection that there is not",
    },
    {
        "name": "dropout_of_units_one_by_one_alike_under_xla",
        "kind": "secure",
        "file": "tfdpsq/privacy/replay.py",
        "old": "counter = tf.stack([tf.cast(microbatch, tf.int64), upper])",
        "new": "counter = tf.cast(tf.cast(microbatch, tf.int32), tf.int64)\n"
        "    counter = tf.stack([counter, upper])",
        "tests": (
            _TESTS + "test_randomness.py::"
            "test_units_taken_one_by_one_have_masks_of_their_own_under_xla",
        ),
        "why": "whoever spoils a batch has its other units dropped out alike",
    },
    {
        "name": "tails_of_secure_noise_cut_at_six_deviations",
        "kind": "secure",
        "file": "tfdpsq/privacy/randomness/grid.py",
        "old": "_DEVIATIONS = 13\n",
        "new": "_DEVIATIONS = 6\n",
        "tests": (_SECURE + "test_what_is_cut_off_is_what_the_docstring_says",),
        "why": "noise that cannot be large rules out sums: 2^-29 of delta a coordinate",
    },
    {
        "name": "secure_not_passed_on_by_the_stages",
        "kind": "secure",
        "file": "tfdpsq/run/training/private_training.py",
        "old": '        "secure": config.secure,\n',
        "new": "",
        "tests": (
            "tests/run/test_run_directory.py::"
            "test_what_is_set_is_what_is_accounted_and_drawn",
        ),
        "why": "who sets secure=True trains with the ordinary generator",
    },
    {
        "name": "one_word_of_a_seed_used_twice",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": "    return seed & _HALF, (seed >> 63) & _HALF\n",
        "new": "    return seed & _HALF, seed & _HALF\n",
        "tests": (
            "tests/privacy/test_randomness.py::"
            "test_both_words_of_a_seed_reach_the_generator",
        ),
        "why": "half of the key's bits can be guessed",
    },
    {
        "name": "coins_of_later_units_thrown_for_the_first",
        "kind": "secure",
        "file": "tfdpsq/privacy/randomness/secure.py",
        "old": "drawn.append(start + np.flatnonzero(coins <= last))",
        "new": "drawn.append(np.flatnonzero(coins <= last))",
        "tests": (
            "tests/privacy/test_secure.py::"
            "test_coins_are_the_same_whatever_is_held_at_a_time",
        ),
        "why": "the first million units are drawn again and again, the others never",
    },
    {
        "name": "pieces_begin_half_a_piece_late",
        "kind": "secure",
        "file": "tfdpsq/privacy/randomness/grid.py",
        "old": "(-self._square * j * j / 2).exp()",
        "new": "(-self._square * j * (j + 1) / 2).exp()",
        "tests": (
            "tests/privacy/test_secure.py::test_pieces_are_proposed_as_often_as_the_density_at_their_beginning",
        ),
        "why": "half a per cent less noise than the certificate states",
    },
)
