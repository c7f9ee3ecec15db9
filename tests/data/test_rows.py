"""Rows come back by number, whatever the shards, and damage is named."""

import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
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


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same 37 rows in 1, 4 and 37 shards, from chunks of several sizes."""
    folder, arrays = tmp_path_factory.mktemp("rows"), _arrays(37)
    made = {
        shards: write_rows(folder / str(shards), _chunks(arrays, sizes), per_shard)
        for shards, sizes, per_shard in (
            (1, [37], 65536),
            (4, [1, 0, 20, 16], 10),
            (37, [36, 1], 1),
        )
    }
    for shards, store in made.items():
        assert len(list(store.path.glob("*.bin"))) == shards
    return made, arrays


@settings(max_examples=30, deadline=None)
@given(indices=st.lists(st.integers(0, 36), max_size=60))
def test_rows_come_in_the_order_asked(stores, indices):
    made, arrays = stores
    for store in made.values():
        assert len(store) == 37
        _assert_rows(store.take(indices), arrays, indices)
        _assert_rows(store.take(np.array(indices, np.uint16)), arrays, indices)


def test_fingerprint_depends_on_rows_not_shards(stores, tmp_path):
    made, arrays = stores
    assert len({store.fingerprint for store in made.values()}) == 1
    fingerprint = made[1].fingerprint
    others = {
        "swapped": {n: np.r_[v[1:2], v[:1], v[2:]] for n, v in arrays.items()},
        "shorter": {n: v[:-1] for n, v in arrays.items()},
        "renamed": {n.replace("ids", "id"): v for n, v in arrays.items()},
        "retyped": {**arrays, "length": arrays["length"].view("<u8")},
        "reshaped": {**arrays, "weight": arrays["weight"].reshape(37, 3, 2)},
        "changed": {**arrays, "flag": ~arrays["flag"]},
    }
    found = {
        name: write_rows(tmp_path / name, [changed], 7).fingerprint
        for name, changed in others.items()
    }
    assert len({fingerprint, *found.values()}) == 1 + len(others)


def test_bad_indices_are_refused(stores):
    for indices in ([37], [0, -1], [0.0], [[0]]):
        with pytest.raises(InputError, match="index|type|shape"):
            stores[0][4].take(indices)


def test_bad_chunks_are_refused_and_leave_nothing(tmp_path):
    for chunks, message in (
        ([], "no rows were given"),
        ([{"a": np.zeros(2), "b": np.zeros(3)}], "chunk 0 .*'a': 2, 'b': 3"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(2, "f4")}], "chunk 1 .*<f4"),
        ([{"a": np.array([None])}], "type object"),
    ):
        with pytest.raises(InputError, match=message):
            write_rows(tmp_path / "rows", chunks)
        assert os.listdir(tmp_path) == []


@pytest.fixture
def store(stores, tmp_path):
    """A store in four shards, to be damaged."""
    return RowStore(shutil.copytree(stores[0][4].path, tmp_path / "store"))


def test_truncated_and_missing_files_are_named(store):
    path = store.path / "rows-00003.bin"
    path.write_bytes(path.read_bytes()[:-1])
    store.take([35])
    # 5 int32, an int64, 6 float16 and a boolean: 20 + 8 + 12 + 1 bytes a row.
    with pytest.raises(DataError, match="rows-00003.bin: has .*7 rows of 41 bytes"):
        store.take([36])
    for use in (lambda: RowStore(store.path), store.verify):
        with pytest.raises(DataError, match="rows-00003.bin: has "):
            use()
    (store.path / "rows-00001.bin").unlink()
    for use in (
        lambda: RowStore(store.path),
        store.verify,
        lambda: store.take([0, 10]),
    ):
        with pytest.raises(DataError, match="rows-00001.bin: cannot be read"):
            use()
    store.take([0, 20])  # The other files need it for nothing.


def test_a_flipped_bit_in_any_file_is_found_by_verify(store):
    for path in sorted(store.path.glob("*.bin")):
        whole = bytearray(path.read_bytes())
        for place in (0, len(whole) // 2, len(whole) - 1):
            changed = whole.copy()
            changed[place] ^= 4
            path.write_bytes(changed)
            with pytest.raises(DataError, match=f"{path.name}: SHA-256 is .* altered"):
                RowStore(store.path).verify()
        path.write_bytes(whole)
    RowStore(store.path).verify()


def test_damaged_manifests_are_named(store):
    path = store.path / "manifest.json"
    for content in ("not json", "{}", path.read_text().replace("37", "38")):
        path.write_text(content)
        with pytest.raises(DataError, match="manifest.json: "):
            RowStore(store.path)
    path.unlink()
    with pytest.raises(DataError, match="manifest.json: cannot be read"):
        RowStore(store.path)


def test_full_disk_leaves_nothing(tmp_path, run_limited):
    done = run_limited(
        "import numpy as np\n"
        "from tfdpsq.data import write_rows\n"
        "write_rows('rows', ({'a': np.ones(1000)} for _ in range(100)), 50_000)",
        100_000,
        tmp_path,
    )
    assert "InputError" in done.stderr and "Free space there" in done.stderr
    assert os.listdir(tmp_path) == []
