"""Rows come back by number, whatever the shards, and damage is named."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpsq.data import RowStore, write_rows
from tfdpsq.validation import DataError, InputError

_ROOT = pathlib.Path(__file__).resolve().parents[2]


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


@settings(max_examples=60, deadline=None)
@given(indices=st.lists(st.integers(0, 36), max_size=60))
def test_rows_come_in_the_order_asked_from_any_number_of_shards(stores, indices):
    made, arrays = stores
    for store in made.values():
        assert len(store) == 37
        _assert_rows(store.take(indices), arrays, indices)
        _assert_rows(store.take(np.array(indices, np.uint16)), arrays, indices)


def test_the_fingerprint_is_of_the_rows_and_not_of_their_cutting(stores, tmp_path):
    made, arrays = stores
    assert len({store.fingerprint for store in made.values()}) == 1
    fingerprint = made[1].fingerprint
    others = {
        "swapped": {n: np.r_[v[1:2], v[:1], v[2:]] for n, v in arrays.items()},
        "shorter": {n: v[:-1] for n, v in arrays.items()},
        "renamed": {n.replace("ids", "id"): v for n, v in arrays.items()},
        "retyped": {
            n: v.view("<u8") if n == "length" else v for n, v in arrays.items()
        },
        "reshaped": {
            n: v.reshape(37, 3, 2) if n == "weight" else v for n, v in arrays.items()
        },
        "changed": {
            n: v ^ (n == "flag") if n == "flag" else v for n, v in arrays.items()
        },
    }
    found = {
        name: write_rows(tmp_path / name, [changed], 7).fingerprint
        for name, changed in others.items()
    }
    assert len({fingerprint, *found.values()}) == 1 + len(others)


def test_rows_lie_as_documented(tmp_path):
    chunk = {"b": np.array([[1, 2], [3, 4]], ">i2"), "a": np.array([1.0, 2.0], "<f4")}
    store = write_rows(tmp_path / "rows", [chunk])
    # Fields by name; a: 1.0 is 0x3f800000 and 2.0 is 0x40000000, little-endian.
    assert (store.path / "rows-00000.bin").read_bytes() == (
        b"\x00\x00\x80\x3f\x01\x00\x02\x00\x00\x00\x00\x40\x03\x00\x04\x00"
    )
    np.testing.assert_array_equal(store.take([1, 0])["b"], [[3, 4], [1, 2]])
    assert store.take([])["b"].shape == (0, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize(
    "indices, message",
    [
        ([37], "index 37 is out of range.*has 37 rows, 0 to 36"),
        ([0, -1], "index -1 is out of range"),
        (np.array([2**64 - 1], np.uint64), "out of range"),
        ([0.0], r"type float64; give a one-dim"),
        ([True], "type bool"),
        ([[0]], r"shape \(1, 1\)"),
        (3, r"shape \(\)"),
    ],
)
def test_what_is_no_index_is_refused(stores, indices, message):
    with pytest.raises(InputError, match=message):
        stores[0][4].take(indices)


@pytest.mark.parametrize(
    "chunks, message",
    [
        ([], "no rows were given"),
        ([{"a": np.zeros((0, 2))}], "no rows were given"),
        ([{}], "numbers of rows: {}"),
        ([{"a": np.zeros(2), "b": np.zeros(3)}], "chunk 0 .*'a': 2, 'b': 3"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(2, "f4")}], "chunk 1 .*<f4.*first .*<f8"),
        ([{"a": np.zeros(2)}, {"a": np.zeros((2, 1))}], r"a <f8\[1\], and the first"),
        ([{"a": np.zeros(2)}, {"b": np.zeros(2)}], "chunk 1 has the fields b"),
        ([{"a": np.float64(1)}], r"field 'a' of chunk 0 has shape \(\)"),
        ([{"a": np.array(["x"])}], "type <U1; give .* integers, floats or booleans"),
        ([{"a": np.array([None])}], "type object"),
        ([{"a": np.zeros((3, 0))}], r"shape \(3, 0\)"),
    ],
)
def test_what_is_no_chunk_is_refused_and_leaves_nothing(tmp_path, chunks, message):
    with pytest.raises(InputError, match=message):
        write_rows(tmp_path / "rows", chunks)
    assert os.listdir(tmp_path) == []


def test_rows_per_shard_and_a_taken_place_are_checked_first(tmp_path):
    def chunks():
        pytest.fail("rows were made")
        yield

    with pytest.raises(InputError, match="rows_per_shard is 0"):
        write_rows(tmp_path / "rows", chunks(), 0)
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="taken: already exists"):
        write_rows(tmp_path / "taken", chunks())


@pytest.fixture
def store(stores, tmp_path):
    """A store in four shards, to be damaged."""
    return RowStore(shutil.copytree(stores[0][4].path, tmp_path / "store"))


def test_an_untouched_store_is_sound(store):
    store.verify()


@pytest.mark.parametrize(
    "change", [lambda b: b[:-1], lambda b: b"", lambda b: b + b"x"]
)
def test_a_file_of_another_size_is_named_on_opening(store, change):
    path = store.path / "rows-00002.bin"
    path.write_bytes(change(path.read_bytes()))
    for use in (lambda: RowStore(store.path), store.verify):
        with pytest.raises(DataError, match="rows-00002.bin: has .* Copy the direc"):
            use()


def test_a_missing_file_is_named_on_opening(store):
    (store.path / "rows-00001.bin").unlink()
    for use in (
        lambda: RowStore(store.path),
        store.verify,
        lambda: store.take([0, 10]),
    ):
        with pytest.raises(DataError, match="rows-00001.bin: cannot be read"):
            use()
    store.take([0, 20])  # The other files need it for nothing.


def test_a_file_truncated_while_in_use_is_named(store):
    path = store.path / "rows-00003.bin"
    path.write_bytes(path.read_bytes()[:-1])
    store.take([35])
    # 5 int32, an int64, 6 float16 and a boolean: 20 + 8 + 12 + 1 bytes a row.
    with pytest.raises(DataError, match="rows-00003.bin: has .*7 rows of 41 bytes"):
        store.take([36])


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


def test_swapped_files_are_found_by_verify(store):
    first, second = store.path / "rows-00000.bin", store.path / "rows-00001.bin"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(DataError, match="rows-00000.bin: SHA-256"):
        RowStore(store.path).verify()


def _edit(*path, value):
    def edit(manifest):
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        _edit("fields", 0, "dtype", value="<i1"),
        _edit("fields", 1, "name", value="other"),
        _edit("fields", 1, "shape", value=[1, 5]),
        _edit("shards", 0, "sha256", value="0" * 64),
        _edit("shards", 0, "file", value="rows-00001.bin"),
        _edit("shards", 3, "count", value=6),
        _edit("count", value=38),
        _edit("fingerprint", value="0" * 64),
        _edit("digest", value="0" * 64),
        lambda manifest: manifest["shards"].reverse(),
        lambda manifest: manifest.pop("shards"),
    ],
)
def test_an_edited_manifest_is_found_on_opening(store, edit):
    path = store.path / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="manifest.json: was edited or damaged. Copy"):
        RowStore(store.path)


def test_verify_sees_a_manifest_edited_with_a_digest_to_match(store):
    path = store.path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    manifest["fields"][0]["name"] = "other"
    content = json.dumps(manifest, sort_keys=True).encode()
    manifest["digest"] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="manifest.json: its fingerprint is not that"):
        RowStore(store.path).verify()


@pytest.mark.parametrize(
    "content, message",
    [
        ("{}", "is not a manifest of rows"),
        ("[]", "is not a manifest of rows"),
        ("not json", "is not a manifest of rows"),
        ('{"format": "tfdpsq-rows/2", "digest": ""}', "tfdpsq reads 'tfdpsq-rows/1'"),
        (None, r"cannot be read \(No such file.* move it away: the same"),
    ],
)
def test_what_is_no_manifest_is_named(store, content, message):
    path = store.path / "manifest.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DataError, match=f"manifest.json: .*{message}"):
        RowStore(store.path)


def test_a_full_disk_leaves_nothing(tmp_path, run_limited):
    done = run_limited(
        "import numpy as np\n"
        "from tfdpsq.data import write_rows\n"
        "write_rows('rows', ({'a': np.ones(1000)} for _ in range(100)), 50_000)",
        100_000,
        tmp_path,
    )
    assert "InputError" in done.stderr and "Free space there" in done.stderr
    assert os.listdir(tmp_path) == []


def test_memory_stays_flat_as_the_rows_grow(tmp_path):
    """128 MiB of rows, written and sampled in less than a tenth of that."""
    code = """
        import resource, sys, types
        import numpy as np
        package = types.ModuleType("tfdpsq.data")  # Whose modules import TensorFlow.
        package.__path__ = [sys.argv[1]]
        sys.modules["tfdpsq.data"] = package
        from tfdpsq.data.rows import write_rows

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        def chunks():
            for first in range(0, 1 << 17, 1 << 10):
                numbers = np.arange(first, first + (1 << 10))
                yield {"number": np.repeat(numbers[:, None], 128, axis=1)}

        next(chunks())
        before = peak()
        store = write_rows("rows", chunks(), rows_per_shard=10_000)
        random = np.random.default_rng(0)
        for _ in range(20):
            indices = random.integers(0, len(store), 512)
            assert (store.take(indices)["number"] == indices[:, None]).all()
        store.verify()
        size = sum(path.stat().st_size for path in store.path.glob("*.bin"))
        assert size == 1 << 27
        sys.stdout.write(str(peak() - before))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(_ROOT / "tfdpsq" / "data")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 12 << 20
    shutil.rmtree(tmp_path / "rows")
