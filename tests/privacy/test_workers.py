"""Two worker processes over loopback: one run, one ledger, one noise."""

import os
import pathlib
import shutil
import sys

import numpy as np
import pytest
from helpers import forking, killing, worker_child
from helpers.small_runs import interrupted_at

from tfdpsq.privacy import workers
from tfdpsq.privacy.batches import require_same_rows
from tfdpsq.privacy.proof.ledger import FILE_NAME, read_ledger

_CHILD = pathlib.Path(__file__).parents[1] / "helpers/worker_child.py"


def _start(base, options=((), ())):
    """Two workers, each with a directory of its own; only the chief's counts."""
    return [
        forking.Command(
            [
                sys.executable,
                str(_CHILD),
                str(base / ("run" if index == 0 else "other")),
                str(base / f"{index}.npz"),
                *options[index],
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                **variables,
            },
        )
        for index, variables in enumerate(killing.cluster(2))
    ]


def _ended(children):
    """Their statuses and words."""
    try:
        words = ["".join(child.communicate(timeout=240)) for child in children]
    finally:
        for child in children:
            child.kill()
    return [child.returncode for child in children], words


def _values(path):
    with np.load(path) as values:
        return [values[name] for name in values.files]


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("SECURE",), marks=pytest.mark.slow)],
)
def test_two_workers_train_what_one_would_and_pay_once(tmp_path, options):
    """One worker and two resume the same run from its first paid step."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    secure = "SECURE" in options
    worker_child.main(run, on_step=interrupted_at(1), secure=secure)
    assert read_ledger(run / FILE_NAME).steps_paid == 1
    shutil.copytree(run, whole)
    statuses, words = _ended(_start(tmp_path, (options, options)))
    assert statuses == [0, 0], words
    worker_child.main(whole, tmp_path / "whole.npz", secure=secure)
    chief, other, alone = (
        _values(tmp_path / f"{name}.npz") for name in ("0", "1", "whole")
    )
    assert len(chief) == len(other) == len(alone) > 8
    for one, two, three in zip(chief, other, alone):
        np.testing.assert_array_equal(one, two)  # the same noise on both, once
        np.testing.assert_allclose(one, three, rtol=0, atol=1e-5)
    # Every step is paid for once, by the chief; the other has no books at all.
    assert (run / FILE_NAME).read_bytes() == (whole / FILE_NAME).read_bytes()
    assert not (tmp_path / "other").exists()
    # The chief's state is that of any run: one process could have gone on from it.
    assert [path.name for path in sorted((run / "state").iterdir())] == [
        path.name for path in sorted((whole / "state").iterdir())
    ]


@pytest.mark.slow
def test_workers_with_other_rows_end_before_anything_is_paid(tmp_path):
    statuses, words = _ended(_start(tmp_path, ((), ("OTHER_ROWS",))))
    assert 0 not in statuses
    for said in words:
        assert "the rows of a step are not the same on all workers" in said, said
    assert read_ledger(tmp_path / "run" / FILE_NAME).steps_paid == 0


def test_any_difference_between_the_workers_rows_ends_them(monkeypatch):
    """Runs what two workers would, one after the other, in one process."""
    said = []
    monkeypatch.setattr(workers, "several", lambda: True)
    monkeypatch.setattr(workers, "gathered", lambda own: said.append(own) or said)
    rows = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "weights": np.ones(3)}
    others = [
        {**rows, "x": rows["x"][::-1]},
        {**rows, "x": rows["x"].reshape(2, 3)},
        {**rows, "weights": np.array([1.0, 1.0, 0.0])},
    ]
    for other in others:
        said.clear()
        require_same_rows(rows)
        require_same_rows(dict(rows))
        with pytest.raises(ValueError, match="rows of a step are not the same on all"):
            require_same_rows(other)
