"""What samplers hand out: shapes, repetition, padding, memory, and what they refuse.

Their laws are tested in test_statistics_sampling.py.
"""

import tracemalloc

import numpy as np
import pytest

from tfdpsq.privacy.randomness.sampling import (
    DealtSampler,
    Draw,
    Groups,
    PoissonSampler,
    ShuffledSampler,
    UserSampler,
)
from tfdpsq.validation import InputError

_LABELS = ["b", "a", "b", "c", "b", "a", "d"]


def _samplers(seed):
    users = PoissonSampler(4, 0.6, 4, seed)
    return {
        "poisson": PoissonSampler(50, 0.3, 20, seed),
        "shuffled": ShuffledSampler(50, 7, seed),
        "dealt": DealtSampler(PoissonSampler(50, 0.3, 20, seed), 3, 8),
        "user": UserSampler(users, Groups.of(_LABELS), 2),
        "shuffled user": UserSampler(
            ShuffledSampler(4, 2, seed), Groups.of(_LABELS), 2
        ),
    }


_NAMES = sorted(_samplers(0))


@pytest.mark.parametrize("name", _NAMES)
def test_draw_of_a_step_depends_on_seed_and_step_alone(name):
    one, other = _samplers(5)[name], _samplers(5)[name]
    later = one.draw(17)
    for step in range(17):
        other.draw(step)
    again = other.draw(17)
    np.testing.assert_array_equal(later.indices, again.indices)
    np.testing.assert_array_equal(later.weights, again.weights)
    assert later.count == again.count


@pytest.mark.parametrize("name", _NAMES)
def test_other_steps_and_other_seeds_give_other_draws(name):
    def drawn(seed):
        sampler = _samplers(seed)[name]
        return [tuple(sampler.draw(step).indices) for step in range(40)]

    one = drawn(5)
    assert len(set(one)) > 4
    assert one != drawn(6)
    assert one != drawn(5 + (1 << 100))


def test_seed_is_fresh_unless_one_is_given_and_not_shown():
    one, other = (PoissonSampler(50, 0.3, 20) for _ in range(2))
    assert one.seed != other.seed and str(one.seed) not in repr(one)
    assert ShuffledSampler(50, 7).seed != ShuffledSampler(50, 7).seed


@pytest.mark.parametrize("name", _NAMES)
def test_draws_have_static_shapes_and_padding_of_weight_zero(name):
    sampler = _samplers(3)[name]
    shapes = set()
    for step in range(60):
        draw = sampler.draw(step)
        shapes.add((draw.indices.shape, draw.weights.shape))
        assert draw.indices.dtype == np.int64 and draw.weights.dtype == np.float32
        assert set(draw.weights.tolist()) <= {0.0, 1.0}
        assert not draw.weights[draw.count :].any()
        assert not draw.indices[draw.weights == 0].any()
        rows = draw.indices[draw.weights == 1]
        assert len(set(rows.tolist())) == len(rows)
    assert len(shapes) == 1


def test_draws_are_empty_or_truncated_at_the_maximum():
    empty = PoissonSampler(5, 1e-9, 4, seed=0).draw(0)
    assert empty.count == 0 and not empty.weights.any()
    draw = PoissonSampler(100, 0.9, 30, seed=0).draw(0)
    assert draw.count == 30
    assert len(set(draw.indices.tolist())) == 30
    np.testing.assert_array_equal(draw.weights, np.ones(30))
    assert set(PoissonSampler(9, 1.0, 20).draw(0).indices[:9]) == set(range(9))


def test_users_rows_lie_together_and_those_they_lack_have_weight_zero():
    # b owns rows 0, 2, 4; a owns 1, 5; c owns 3; d owns 6. Units are a, b, c, d.
    owned = [{1, 5}, {0, 2, 4}, {3}, {6}]
    units = PoissonSampler(4, 0.6, 4, seed=8)
    sampler = UserSampler(units, Groups.of(_LABELS), 2)
    for step in range(60):
        users, draw = units.draw(step), sampler.draw(step)
        assert draw.count == 2 * users.count
        for place, user in enumerate(users.indices[: users.count]):
            part = slice(2 * place, 2 * place + 2)
            rows = draw.indices[part][draw.weights[part] == 1]
            assert len(rows) == min(2, len(owned[user]))
            assert set(rows.tolist()) <= owned[user]


def test_a_user_without_rows_takes_part_with_none():
    groups = Groups(np.array([4, 5]), np.array([0, 1, 1, 2]))
    draw = UserSampler(PoissonSampler(3, 1.0, 3), groups).draw(0)
    assert draw.count == 3
    assert sorted(draw.indices[draw.weights == 1].tolist()) == [4, 5]


@pytest.mark.parametrize(
    "labels",
    [
        _LABELS,
        # As floats, most of them would be one.
        [2**63 + 1, 2**63, 2**63 + 1, 2**63 + 2, 2**63 + 1, 2**63, -5],
        np.array([7, 3, 7, 9, 7, 3, 11], np.uint8),
        np.array(["b", "a", "b", "c", "b", "a", "d"], object),
    ],
)
def test_groups_hold_the_rows_of_each_label(labels):
    groups = Groups.of(labels)
    assert len(groups) == 4
    found = [
        groups.rows[start:end].tolist()
        for start, end in zip(groups.offsets[:-1], groups.offsets[1:])
    ]
    expected = [
        [row for row, label in enumerate(labels) if label == owner]
        for owner in sorted(set(labels))
    ]
    assert found == expected


def test_poisson_draw_needs_the_memory_of_a_batch_and_not_of_the_data():
    sampler = PoissonSampler(10**12, 1e-9, 1200, seed=1)
    sampler.draw(0)  # what numpy imports on first use is not the draw's
    tracemalloc.start()
    draw = sampler.draw(1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert draw.count > 800 and draw.indices.max() > 10**11
    assert peak < 500 * 1200  # bytes: some tens of int64 for each of 1200 rows


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Groups.of([]), "one label for each row"),
        # Several owners each, who would be one unit.
        (lambda: Groups.of(np.array([1.0, np.nan, np.nan])), "float"),
        (lambda: Groups.of(["a", None, None]), "NoneType and str"),
        (lambda: Groups.of(np.ma.masked_array([1, 1], [False, True])), "masked"),
        (lambda: Groups(np.arange(3), np.array([0, 2])), "from 0 to the number"),
        (lambda: Groups(np.arange(3), np.array([0, 2, 1, 3])), "offsets must rise"),
        (lambda: Groups(np.arange(0), np.array([0])), "one step for each unit"),
        (lambda: Groups(np.array([0, 0.4]), np.arange(3)), "Cannot cast"),
        # Row -1 of three rows is row 2, which would then have two owners.
        (lambda: Groups(np.array([0, 1, -1]), np.array([0, 2, 3])), "negative number"),
        (lambda: Groups(np.array([0, 1, 1]), np.array([0, 2, 3])), "two units"),
    ],
)
def test_groups_that_could_merge_owners_are_refused(make, message):
    with pytest.raises((InputError, TypeError), match=message):
        make()


@pytest.mark.parametrize("capacity", [3, 40])
def test_one_unit_more_changes_at_most_the_group_it_is_dealt_to(capacity):
    """What 2C rests on: a unit changes the group that it is dealt to, and no other."""

    class Given(PoissonSampler):
        """Draws the units it is given, the last of them after all others."""

        def __init__(self, units):
            super().__init__(100, 0.3, 100, seed=8)
            object.__setattr__(self, "_given", np.array(units))

        def draw(self, step):
            return Draw(self._given, np.ones(len(self._given)), len(self._given))

    touched = set()
    for step in range(60):
        units = np.random.default_rng(step).choice(99, 20, replace=False)
        without, with_it = (
            DealtSampler(Given(drawn), 6, capacity).draw(step)
            for drawn in (units, [*units, 99])
        )
        changed = {
            group
            for group in range(6)
            for values in ("indices", "weights")
            if not np.array_equal(
                getattr(without, values).reshape(6, -1)[group],
                getattr(with_it, values).reshape(6, -1)[group],
            )
        }
        assert len(changed) <= 1  # none where its group is full
        touched |= changed
    assert len(touched) > 3
