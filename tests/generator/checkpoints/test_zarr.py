"""zarr directories, written here and by tensorstore, under damage, too."""

import sys

import numpy as np
import pytest
import tensorstore

from tfdpsq import validation
from tfdpsq.generator.checkpoints import zarr

SHAPE, CHUNKS = (45, 10), (16, 4)


def write_by_tensorstore(directory, array, **metadata):
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(directory)},
        "metadata": {"shape": SHAPE, "chunks": CHUNKS, "dtype": "<f4", **metadata},
    }
    tensorstore.open(spec, create=True).result().write(array).result()
    return zarr.Array(directory, "w")


def read_by_tensorstore(directory):
    place = {"driver": "file", "path": str(directory)}
    store = tensorstore.open({"driver": "zarr", "kvstore": place}, open=True)
    return store.result().read().result()


@pytest.fixture(scope="module")
def values():
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


@pytest.mark.parametrize(
    "metadata",
    [
        {"compressor": {"id": "gzip", "level": 1}},
        {"compressor": {"id": "zlib", "level": 1}},
        {"compressor": None},
        {"compressor": {"id": "zstd", "level": 1}},
        {"compressor": {"id": "gzip", "level": 1}, "order": "F"},
        {"compressor": None, "dimension_separator": "/"},
        {"compressor": None, "chunks": [100, 100]},
    ],
)
def test_any_rows_of_any_layout(tmp_path, values, metadata, monkeypatch):
    # Two chunks of 256 bytes fit, so that some are given up and unpacked again.
    monkeypatch.setattr(zarr, "_CACHE", 600)
    array = write_by_tensorstore(tmp_path / "w", values, **metadata)

    assert (array.shape, array.dtype) == (SHAPE, "float32")
    for start, stop in [(0, 45), (0, 1), (15, 17), (16, 32), (3, 40), (44, 45)]:
        assert np.array_equal(array.read(start, stop), values[start:stop])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_written_is_zarr_to_tensorstore(tmp_path, values, dtype):
    array = values.astype(dtype)
    blocks = [array[start : start + 20] for start in (0, 20, 40)]
    for name in ("a", "b"):
        zarr.write(tmp_path / name, SHAPE, dtype, blocks)

    assert np.array_equal(read_by_tensorstore(tmp_path / "a"), array)
    assert np.array_equal(zarr.Array(tmp_path / "a", "w").read(18, 43), array[18:43])
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_bytes_that_were_changed_are_noticed(tmp_path, values):
    array = write_by_tensorstore(tmp_path / "w", values, compressor={"id": "gzip"})
    chunk = tmp_path / "w" / "1.0"
    content = chunk.read_bytes()
    half = len(content) // 2
    for bad in (
        content[:half],
        content[:-9],  # the last 8 hold a checksum and a length, no values
        content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
        b"",
    ):
        chunk.write_bytes(bad)
        with pytest.raises(validation.DataError, match="1.0: weight w is truncated or"):
            array.read(0, 45)


def test_damage_that_the_compressor_notices(tmp_path, values):
    array = write_by_tensorstore(tmp_path / "w", values, compressor={"id": "zstd"})
    (tmp_path / "w" / "2.1").write_bytes(b"no zstd")
    with pytest.raises(validation.DataError, match="2.1: weight w is truncated or"):
        array.read(0, 45)


class _Waiting:
    """An array of TensorStore whose reads never end."""

    def __getitem__(self, rows):
        return self

    def read(self):
        never, future = tensorstore.Promise.new()
        self.promises = [*getattr(self, "promises", []), never]
        return future


def test_a_read_without_an_answer_is_begun_anew_or_ends(tmp_path, values, monkeypatch):
    monkeypatch.setattr(zarr, "_PATIENCE", 0.5)
    array = write_by_tensorstore(tmp_path / "w", values)
    context = zarr._context(tensorstore)
    array._store = _Waiting()
    np.testing.assert_array_equal(array.read(3, 40), values[3:40])
    assert zarr._context(tensorstore) is not context
    array._store, array._open = _Waiting(), _Waiting
    with pytest.raises(validation.DataError, match="no answer about weight w in 2 s"):
        array.read(3, 40)


def test_an_opening_without_an_answer_does_not_blame_the_copy(
    tmp_path, values, monkeypatch
):
    monkeypatch.setattr(zarr, "_PATIENCE", 0.1)
    write_by_tensorstore(tmp_path / "w", values)
    waiting = _Waiting()
    monkeypatch.setattr(tensorstore, "open", lambda *_, **__: waiting.read())
    with pytest.raises(validation.DataError, match="no answer.*Run the same"):
        zarr.Array(tmp_path / "w", "w")


def test_a_missing_library_is_named_with_the_remedy(tmp_path, values, monkeypatch):
    write_by_tensorstore(tmp_path / "w", values)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(validation.InputError, match=r"tensorstore.*tfdpsq\[t5x\]"):
        zarr.Array(tmp_path / "w", "w")
