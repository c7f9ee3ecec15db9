"""zarr directories, written here and by tensorstore, under damage, too."""

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
        {"compressor": {"id": "zstd", "level": 1}, "order": "F"},
        {"compressor": None, "dimension_separator": "/"},
    ],
)
def test_any_rows_of_any_layout_are_read(tmp_path, values, metadata):
    array = write_by_tensorstore(tmp_path / "w", values, **metadata)

    assert (array.shape, array.dtype) == (SHAPE, "float32")
    for start, stop in [(0, 45), (0, 1), (15, 17), (16, 32), (3, 40), (44, 45)]:
        assert np.array_equal(array.read(start, stop), values[start:stop])


def test_written_directory_is_read_by_tensorstore(tmp_path, values):
    dtype = "float16"
    array = values.astype(dtype)
    blocks = [array[start : start + 20] for start in (0, 20, 40)]
    for name in ("a", "b"):
        zarr.write(tmp_path / name, SHAPE, dtype, blocks)

    assert np.array_equal(read_by_tensorstore(tmp_path / "a"), array)
    assert np.array_equal(zarr.Array(tmp_path / "a", "w").read(18, 43), array[18:43])
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_changed_bytes_are_detected(tmp_path, values):
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
