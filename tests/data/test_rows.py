"""Rows come back by number, and damage is named."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdpsq.data import RowStore, write_rows
from tfdpsq.validation import DataError, InputError


def _arrays(rows, seed=0):
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(-(2**31), 2**31, (rows, 5), np.int32),
        "length": random.integers(0, 2**62, rows, np.int64),
        "weight": random.standard_normal((rows, 2, 3)).astype(np.float16),
        "flag": random.random(rows) < 0.5,
    }


def _chunks(arrays, sizes):
    start = 0
    for size in sizes:
        yield {name: values[start : start + size] for name, values in arrays.items()}
        start += size


def _assert_rows(taken, arrays, indices):
    assert set(taken) == set(arrays)
    for name, values in arrays.items():
        assert taken[name].dtype == values.dtype
        assert taken[name].flags.c_contiguous
        # As bytes: NaN and -0.0 are numbers to be kept, too.
        assert taken[name].tobytes() == values[np.asarray(indices, int)].tobytes()
        assert taken[name].shape == (len(indices), *values.shape[1:])


@pytest.fixture
def store(tmp_path):
    return write_rows(tmp_path / "store", _chunks(_arrays(37), [1, 0, 20, 16]))


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(indices=st.lists(st.integers(0, 36), max_size=60))
def test_rows_come_in_the_order_asked(store, indices):
    assert len(store) == 37
    _assert_rows(store.take(indices), _arrays(37), indices)
    _assert_rows(store.take(np.array(indices, np.uint16)), _arrays(37), indices)


def test_fingerprint_depends_on_rows_not_chunks(store, tmp_path):
    arrays = _arrays(37)
    assert write_rows(tmp_path / "whole", [arrays]).fingerprint == store.fingerprint
    others = {
        "swapped": {n: np.r_[v[1:2], v[:1], v[2:]] for n, v in arrays.items()},
        "retyped": {**arrays, "length": arrays["length"].view("<u8")},
        "changed": {**arrays, "flag": ~arrays["flag"]},
    }
    found = {
        name: write_rows(tmp_path / name, [changed]).fingerprint
        for name, changed in others.items()
    }
    assert len({store.fingerprint, *found.values()}) == 1 + len(others)


def test_no_rows_are_refused_and_leave_nothing(tmp_path):
    with pytest.raises(InputError, match="no rows were given"):
        write_rows(tmp_path / "rows", [])
    assert os.listdir(tmp_path) == []


def test_damaged_and_missing_files_are_named(store):
    path = store.path / "rows.npy"
    whole = path.read_bytes()
    for place in (1024, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(DataError, match="rows.npy: SHA-256 is not"):
            RowStore(store.path).verify()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="rows.npy: it cannot be read"):
        RowStore(store.path)
    path.unlink()
    with pytest.raises(DataError, match="rows.npy: it cannot be read"):
        RowStore(store.path)
    (store.path / "manifest.json").write_text("not json")
    with pytest.raises(DataError, match="manifest.json: not JSON"):
        RowStore(store.path)
