"""Mistakes in draws and in keys: random numbers that tell of one another."""

MUTATIONS = (
    {
        "name": "groups_dealt_by_the_samples_bits",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "random = _generator(self.units._seed, step, _DEALT)",
        "new": "random = _generator(self.units._seed, step, _UNITS)",
        "tests": (
            "tests/privacy/test_statistics_sampling.py::"
            "test_the_group_of_a_unit_says_nothing_of_how_many_were_drawn",
        ),
        "why": (
            "a unit's group tells how many were drawn, and the dealing is "
            "not independent of the sample, which amplification rests on"
        ),
    },
    {
        "name": "rows_of_users_by_the_samples_bits",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "random = _generator(self.units._seed, step, _ROWS)",
        "new": "random = _generator(self.units._seed, step, _UNITS)",
        "tests": (
            "tests/privacy/test_statistics_sampling.py::"
            "test_the_rows_of_a_user_say_nothing_of_how_many_users_were_drawn",
        ),
        "why": ("which of a user's rows take part tells how many users do"),
    },
    {
        "name": "batches_of_an_epoch_overlap",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "places += batch * self.max_batch_size",
        "new": "places += batch * (self.max_batch_size - 1)",
        "tests": (
            "tests/privacy/test_sampling.py::"
            "test_a_shuffled_epoch_is_a_permutation_cut_into_equal_batches",
        ),
        "why": (
            "a unit is in two batches of an epoch, which is accounted for "
            "as one release"
        ),
    },
    {
        "name": "one_draw_for_two_steps",
        "kind": "sampling",
        "file": "tfdpsq/privacy/loop.py",
        "old": "draws = [self.sampler.draw(number) for number in now]",
        "new": "draws = [self.sampler.draw(number // 2) for number in now]",
        "tests": (
            "tests/privacy/test_paid_steps.py::"
            "test_steps_taken_again_are_the_same_and_not_paid_for_again",
        ),
        "why": (
            "steps are composed as independent draws, and two with the same"
            " rows are not"
        ),
    },
    {
        "name": "full_groups_keep_the_lowest_rows",
        "kind": "sampling",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": ("own = drawn.indices[: drawn.count][dealt == group][: self.capacity]"),
        "new": (
            "own = np.sort(drawn.indices[: drawn.count][dealt == group])\n"
            "            own = own[: self.capacity]"
        ),
        "tests": (
            "tests/privacy/test_sampling.py::"
            "test_dealt_rows_lie_in_their_group_and_a_full_group_keeps_its_first",
        ),
        "why": ("rows at the front of the data take part more often than others"),
    },
    {
        "name": "dropout_from_the_noises_bits",
        "kind": "keys",
        "file": "tfdpsq/privacy/optimizers.py",
        "old": 'as_words(derived_seed(noise_seed, "dropout"))',
        "new": 'as_words(derived_seed(noise_seed, "noise 0"))',
        "tests": (
            "tests/privacy/test_optimizers.py::"
            "test_dropout_draws_from_other_bits_than_the_noise",
        ),
        "why": ("masks show in the gradients, and would tell of the noise"),
    },
    {
        "name": "one_derived_seed_for_all_purposes",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/noise.py",
        "old": 'message = seed.to_bytes(16, "big") + purpose.encode()',
        "new": 'message = seed.to_bytes(16, "big")',
        "tests": (
            "tests/privacy/test_optimizers.py::"
            "test_dropout_draws_from_other_bits_than_the_noise",
        ),
        "why": ("the same, where the seeds are derived"),
    },
    {
        "name": "one_seed_for_noise_and_sampler",
        "kind": "keys",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "made = Secrets(fresh_seed(secure), fresh_seed(secure))",
        "new": "made = Secrets(*[fresh_seed(secure)] * 2)",
        "tests": (
            "tests/privacy/test_kept_seeds.py::"
            "test_every_run_draws_two_seeds_of_128_bits",
        ),
        "why": ("whoever learns which rows were drawn can subtract the noise"),
    },
    {
        "name": "seeds_of_32_bits",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "return secrets.randbits(KEY_BITS if secure else 128)",
        "new": "return secrets.randbits(32)",
        "tests": (
            "tests/privacy/test_kept_seeds.py::"
            "test_every_run_draws_two_seeds_of_128_bits",
        ),
        "why": ("four billion noises are tried in an hour"),
    },
    {
        "name": "sampler_uses_32_bits_of_its_seed",
        "kind": "keys",
        "file": "tfdpsq/privacy/randomness/sampling.py",
        "old": "np.random.SeedSequence([seed, number], spawn_key=(stream,))",
        "new": (
            "np.random.SeedSequence(\n"
            "        [seed & 0xFFFFFFFF, number], spawn_key=(stream,)\n"
            "    )"
        ),
        "tests": (
            "tests/privacy/test_sampling.py::"
            "test_other_steps_and_other_seeds_give_other_draws[dealt]",
        ),
        "why": ("all draws can be guessed, and amplification needs them secret"),
    },
    {
        "name": "microbatches_share_masks",
        "kind": "keys",
        "file": "tfdpsq/privacy/replay.py",
        "old": "counter = tf.stack([tf.cast(microbatch, tf.int64), upper])",
        "new": "counter = tf.stack([tf.zeros([], tf.int64), upper])",
        "tests": (
            "tests/privacy/test_randomness.py::"
            "test_no_two_draws_of_a_step_have_one_key",
        ),
        "why": ("layers of different microbatches drop the same units"),
    },
    {
        "name": "seeds_readable_by_everybody",
        "kind": "keys",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "return os.open(path, flags, 0o600)",
        "new": "return os.open(path, flags, 0o644)",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_what_a_run_keeps_is_its_owners_alone",
        ),
        "why": ("every account of the machine can subtract the noise"),
    },
    {
        "name": "ledger_readable_by_everybody",
        "kind": "keys",
        "file": "tfdpsq/privacy/proof/append_only.py",
        "old": "descriptor = os.open(partial, flags, 0o600)",
        "new": "descriptor = os.open(partial, flags, 0o644)",
        "tests": (
            "tests/privacy/test_before_spending.py::"
            "test_what_a_run_keeps_is_its_owners_alone",
        ),
        "why": ("its nonce is what makes the released head safe"),
    },
    {
        "name": "fingerprints_under_a_known_key",
        "kind": "keys",
        "file": "tfdpsq/run/core/sources.py",
        "old": "key = bytes.fromhex(written.decode())",
        "new": 'key = b"tfdpsq"',
        "tests": (
            "tests/run/test_release_secrets.py::"
            "test_a_fingerprint_is_keyed_by_what_its_owner_alone_has",
        ),
        "why": ("guesses at a private query can be tested against a released hash"),
    },
    {
        "name": "one_fingerprint_key_for_all_owners",
        "kind": "keys",
        "file": "tfdpsq/run/core/sources.py",
        "old": "atomic_write(own, secrets.token_hex(32))",
        "new": 'atomic_write(own, "5a" * 32)',
        "tests": (
            "tests/run/test_release_secrets.py::"
            "test_a_fingerprint_is_keyed_by_what_its_owner_alone_has",
        ),
        "why": ("the same, by the file that holds the key"),
    },
    {
        "name": "seeds_shown_by_their_repr",
        "kind": "keys",
        "file": "tfdpsq/privacy/checkpoint.py",
        "old": "    noise_seed: int = dataclasses.field(repr=False)\n",
        "new": "    noise_seed: int\n",
        "tests": (
            "tests/privacy/test_kept_seeds.py::"
            "test_what_holds_the_seeds_does_not_show_them",
        ),
        "why": "a traceback with the values of its frames tells the noise",
    },
    {
        "name": "numbers_that_rows_share_are_taken",
        "kind": "noise",
        "file": "tfdpsq/privacy/trials.py",
        "old": "if traced.draws and not coupled and not declared:",
        "new": "if False:",
        "tests": (
            "tests/privacy/test_randomness.py::test_numbers_that_rows_share_are_refused",
        ),
        "why": "a row more moves others to another microbatch and its crop",
    },
    {
        "name": "one_number_for_all_rows_is_their_own",
        "kind": "noise",
        "file": "tfdpsq/privacy/replay.py",
        "old": "if not first or first % rows:",
        "new": "if not first:",
        "tests": (
            "tests/privacy/test_randomness.py::test_numbers_that_rows_share_are_refused",
        ),
        "why": "Dropout(noise_shape=(1, None)) drops the same inputs of all rows",
    },
    {
        "name": "what_layers_draw_by_themselves_is_not_looked_at",
        "kind": "noise",
        "file": "tfdpsq/privacy/replay.py",
        "old": "Draw(name, known.get(name, unknown)) for name in sorted(drawn)",
        "new": "Draw(name, unknown) for name in ()",
        "tests": (
            "tests/privacy/test_randomness.py::test_numbers_that_rows_share_are_refused",
        ),
        "why": "RandomContrast draws one factor for all rows with the seed it is given",
    },
    {
        "name": "draws_inside_of_loops_are_not_looked_at",
        "kind": "noise",
        "file": "tfdpsq/privacy/replay.py",
        "old": "for name in sorted(drawn)]",
        "new": "for name in sorted(drawn & known.keys())]",
        "tests": (
            "tests/privacy/test_randomness.py::test_numbers_that_rows_share_are_refused",
        ),
        "why": "nobody knows whether every row has numbers of its own",
    },
    {
        "name": "layers_may_run_eagerly",
        "kind": "reads",
        "file": "tfdpsq/privacy/trials.py",
        "old": "if tf.config.functions_run_eagerly():",
        "new": "if False:",
        "tests": (
            "tests/privacy/test_fit_inputs.py::test_functions_that_run_eagerly_see_no_row",
        ),
        "why": "a layer that keeps its inputs in a list keeps rows",
    },
    {
        "name": "validation_may_run_eagerly",
        "kind": "reads",
        "file": "tfdpsq/privacy/fit_inputs.py",
        "old": 'if options.get("run_eagerly"):',
        "new": "if False:",
        "tests": (
            "tests/privacy/test_fit_inputs.py::test_what_compile_cannot_take_is_named",
        ),
        "why": "a layer that keeps its inputs in a list keeps validation rows",
    },
    {
        "name": "half_of_the_rows_have_the_numbers_of_the_others",
        "kind": "noise",
        "file": "tfdpsq/privacy/replay.py",
        "old": "if not first or first % rows:",
        "new": "if not first or first < rows // 2:",
        "tests": (
            "tests/privacy/test_randomness.py::"
            "test_numbers_that_rows_share_are_refused",
        ),
        "why": "a row more changes which rows have the same numbers",
    },
    {
        "name": "numbers_may_be_mixed_over_the_batch",
        "kind": "noise",
        "file": "tfdpsq/privacy/trials.py",
        "old": "    if draws and not declared:\n",
        "new": "    if False:\n",
        "tests": (
            "tests/privacy/test_randomness.py::"
            "test_numbers_of_a_row_that_others_use_are_refused",
        ),
        "why": "the mean of all rows' numbers is one that they share",
    },
    {
        "name": "a_row_alone_is_in_a_smaller_batch",
        "kind": "clipping",
        "file": "tfdpsq/privacy/step.py",
        "old": "unit = _alone(part, row, together)",
        "new": "unit = _slice(part, row, together)",
        "tests": (
            "tests/privacy/test_independence.py::"
            "test_a_row_without_a_gradient_changes_no_number_of_rows_for_others",
        ),
        "why": "a loss that reads how many rows there are tells of a row of NaN",
    },
    {
        "name": "padding_follows_how_many_were_drawn",
        "kind": "sampling",
        "file": "tfdpsq/privacy/batches.py",
        "old": "if plan.spec.sensitivity_multiplier == 1:  # nothing is declared",
        "new": "if False:",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_a_loss_reads_no_private_number_of_rows",
        ),
        "why": "a loss that reads how many rows there are moves with one row more",
    },
    {
        "name": "a_seed_may_be_a_number",
        "kind": "noise",
        "file": "tfdpsq/privacy/trials.py",
        "old": "        replay.require_seeds_draw(traced.function.graph)\n",
        "new": "        pass\n",
        "tests": (
            "tests/privacy/test_randomness.py::"
            "test_what_layers_draw_from_a_seed_of_their_own_is_looked_into",
        ),
        "why": "all rows of a microbatch share it",
    },
    {
        "name": "what_a_layer_draws_itself_stays_as_it_is",
        "kind": "noise",
        "file": "tfdpsq/privacy/replay.py",
        "old": "return tf.where(column, others, numbers)",
        "new": "return numbers",
        "tests": (
            "tests/privacy/test_randomness.py::"
            "test_what_layers_draw_from_a_seed_of_their_own_is_looked_into",
        ),
        "why": "the mean of what it drew for all rows is one that they share",
    },
    {
        "name": "a_row_alone_is_among_padding_that_can_spoil_it",
        "kind": "clipping",
        "file": "tfdpsq/privacy/step.py",
        "old": "tf.gather(value, start + (places - start) % rows)",
        "new": "tf.einsum('n...,n->n...', value, tf.cast(own, value.dtype))",
        "tests": (
            "tests/privacy/test_independence.py::"
            "test_padding_that_spoils_a_batch_spoils_no_row",
        ),
        "why": "a full microbatch counts, and one with a row less is nothing",
    },
    {
        "name": "an_id_that_is_none_escapes_clipping",
        "kind": "clipping",
        "file": "tfdpsq/privacy/fast/recorder.py",
        "old": "known = (ids >= 0) & (ids < variable.shape[0])",
        "new": "known = ids == ids",
        "tests": (
            "tests/privacy/test_fast_units.py::"
            "test_an_id_that_is_none_cannot_escape_clipping",
        ),
        "why": "the norm has a term that the sum lacks, or they cancel",
    },
    {
        "name": "numbers_of_a_constant_seed_are_taken",
        "kind": "noise",
        "file": "tfdpsq/privacy/trials.py",
        "old": "        replay.require_secret_seeds(traced.function.graph)\n",
        "new": "",
        "tests": (
            "tests/privacy/test_randomness.py::"
            "test_what_layers_draw_from_a_seed_of_their_own_is_looked_into",
        ),
        "why": "they are those of a place, which the rows before decide",
    },
    {
        "name": "a_seed_may_go_into_a_branch",
        "kind": "noise",
        "file": "tfdpsq/privacy/replay.py",
        "old": "elif not _is_seeded_by(user, output):",
        "new": 'elif not user.type.startswith("Stateless"):',
        "tests": (
            "tests/privacy/test_randomness.py::"
            "test_what_layers_draw_from_a_seed_of_their_own_is_looked_into",
        ),
        "why": "one sign for all rows of a microbatch",
    },
    {
        "name": "a_loss_of_many_rows_may_write",
        "kind": "clipping",
        "file": "tfdpsq/privacy/training.py",
        "old": "        require_nothing_kept(of_loss)",
        "new": "        del of_loss",
        "tests": (
            "tests/privacy/test_training.py::"
            "test_what_a_loss_writes_of_many_rows_alone_is_found",
        ),
        "why": "a variable keeps what it saw of private rows",
    },
)
