"""Canaries among some of the pairs alone, where a secret is learnt sooner."""

import importlib.util
import pathlib

import pytest

from tfdpsq.data import BeirDirectory
from tfdpsq.run import canaries
from tfdpsq.validation import InputError

_spec = importlib.util.spec_from_file_location(
    "tiny", pathlib.Path(__file__).parent / "tiny.py"
)
_tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tiny)


def _insert(base, name, **settings):
    config = canaries.default_config()
    config.update(data=str(base / "pairs"), trials=1, candidates=20, **settings)
    canaries.run(config, base / "private" / name)
    made = canaries.read_canaries(base / "private" / name)
    return BeirDirectory(base / "private" / name / canaries.DATA), made


def test_so_many_pairs_are_kept_and_all_canaries(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs", train=120)
    given = BeirDirectory(tmp_path / "pairs")
    fewer, made = _insert(tmp_path, "fewer", most_pairs=50, repetitions=(1, 10))
    found = set(fewer.positives("train"))
    added = {name for name in found if name.startswith(canaries.ID_PREFIX)}
    kept = found - added
    assert len(added) == sum(canary.repetitions for canary in made) == 33
    assert len(kept) == 50 and kept < set(given.positives("train"))
    # Drawn at random, not the first ones.
    assert kept != {f"q{i}" for i in range(50)}
    for split in ("dev", "test"):
        assert fewer.qrels(split) == given.qrels(split)
    # What is left out is nowhere, and documents are all there: they are public.
    left_out = set(given.positives("train")) - kept
    assert left_out.isdisjoint(fewer.queries())
    assert [d.id for d in fewer.documents()] == [d.id for d in given.documents()]
    # Every query has a user, so that a generator can be trained for users.
    assert set(fewer.users("train")) == found


def test_a_number_of_pairs_that_is_none_is_refused(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs", train=20)
    with pytest.raises(InputError, match="most_pairs is -3"):
        _insert(tmp_path, "fewer", most_pairs=-3)
    assert not (tmp_path / "private" / "fewer").exists()
