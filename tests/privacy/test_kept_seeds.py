"""Seeds and states that a run keeps: shown to nobody, and of this run alone."""

import functools
import itertools
import json
import operator
import os

import pytest
import tensorflow as tf

from tfdpsq.privacy import checkpoint, discard_state
from tfdpsq.privacy.training import Kept
from tfdpsq.validation import DataError, InputError


def test_every_run_draws_a_seed_of_128_bits(tmp_path):
    """It must not be found by searching.

    Until a step is paid for it is drawn again: a copy of the directory may have gone on
    as another run.
    """
    seeds = []
    for _ in range(80):
        found = checkpoint.open_secrets(tmp_path, "run", 0, {})
        assert checkpoint.open_secrets(tmp_path, "run", 1, {}) == found
        seeds.append(found.seed)
    assert len(set(seeds)) == 80
    # Each bit is 0 in some and 1 in others: missed by chance once in 10^21.
    ones = functools.reduce(operator.or_, seeds)
    zeros = functools.reduce(operator.and_, seeds)
    assert ones == (1 << 128) - 1 and zeros == 0
    # Between any two, about half of the bits differ: 11 deviations would be 2 or 126.
    for one, other in itertools.combinations(seeds, 2):
        assert 20 < bin(one ^ other).count("1") < 108
    # A new seed also removes the state that was saved under the old one.
    checkpoint.save(tmp_path, 0, [tf.Variable(1.0)], "run")
    checkpoint.open_secrets(tmp_path, "run", 0, {})
    assert os.listdir(tmp_path / checkpoint.STATE) == [checkpoint.SECRETS]
    discard_state(tmp_path)
    assert not (tmp_path / checkpoint.STATE).exists()
    discard_state(tmp_path)


def test_seeds_and_states_are_bound_to_the_run_of_their_ledger(tmp_path):
    """Restored from different backups, paid steps would be taken again as others."""
    found = checkpoint.open_secrets(tmp_path, "one", 0, {})
    assert checkpoint.open_secrets(tmp_path, "one", 1, {}) == found
    with pytest.raises(DataError, match="not the seeds of the 1 steps"):
        checkpoint.open_secrets(tmp_path, "other", 1, {})
    checkpoint.save(tmp_path, 1, [tf.Variable([1.0, 2.0])], "one")
    with pytest.raises(DataError, match="state of another run"):
        checkpoint.restore(tmp_path, [tf.Variable([1.0, 2.0])], 1, "other")


def test_objects_that_hold_the_seed_do_not_show_it(tmp_path):
    """Tracebacks and logs show the `repr` of what a frame holds."""
    found = checkpoint.open_secrets(tmp_path, "run", 0, {})
    kept = Kept(tmp_path, None, found)
    assert str(found.seed) not in f"{found!r} {kept!r} {kept}"


def test_state_of_other_shapes_is_not_restored(tmp_path):
    checkpoint.open_secrets(tmp_path, "run", 0, {})
    with pytest.raises(InputError, match="there is no saved state"):
        checkpoint.restore(tmp_path, [tf.Variable([1.0, 2.0])], 2, "run")
    checkpoint.save(tmp_path, 2, [tf.Variable([1.0, 2.0])], "run")
    for other in ([tf.Variable([1, 2])], [tf.Variable([[1.0, 2.0]])]):
        before = other[0].numpy().tolist()
        with pytest.raises(InputError, match="another model or optimizer"):
            checkpoint.restore(tmp_path, other, 2, "run")
        assert other[0].numpy().tolist() == before


def test_bfloat16_weights_are_restored_bit_by_bit(tmp_path):
    checkpoint.open_secrets(tmp_path, "run", 0, {})
    values = [[1.5, -0.0078125, 3e38], [0.1, 0.2, 0.3]]
    saved = [tf.Variable(v, dtype=tf.bfloat16) for v in values]
    checkpoint.save(tmp_path, 4, saved, "run")
    loaded = [tf.Variable(tf.zeros([3], tf.bfloat16)) for _ in values]
    assert checkpoint.restore(tmp_path, loaded, 4, "run") == 4
    for one, other in zip(saved, loaded):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_flipped_byte_of_a_state_is_refused_or_harmless(tmp_path):
    """zipfile raises several kinds of errors for a damaged archive."""
    checkpoint.open_secrets(tmp_path, "run", 0, {})
    variables = [tf.Variable([[1.0, 2.0]]), tf.Variable(3, dtype=tf.int64)]
    checkpoint.save(tmp_path, 3, variables, "run")
    (path,) = (tmp_path / checkpoint.STATE).glob("*.npz")
    whole, refused = path.read_bytes(), 0
    for at in range(0, len(whole), 4):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        try:
            checkpoint.restore(tmp_path, variables, 5, "run")
        except InputError:
            refused += 1
    assert refused > len(whole) / 10  # of values, names and lengths


@pytest.mark.parametrize("damaged", ["", '{"run": "one"', '{"run": "one"}'])
def test_damaged_seeds_are_refused(tmp_path, damaged):
    kept = {"run": "one", "seed": (1 << 128) - 1, "settings": {}}
    path = tmp_path / checkpoint.STATE / checkpoint.SECRETS
    path.parent.mkdir()
    path.write_text(json.dumps(kept))
    assert checkpoint.open_secrets(tmp_path, "one", 1, {}).seed == (1 << 128) - 1
    path.write_text(damaged)
    with pytest.raises(DataError, match="the run's seed"):
        checkpoint.open_secrets(tmp_path, "one", 1, {})
