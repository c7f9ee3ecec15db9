"""What is written appears whole or not at all, also when the disk is full."""

import os
import sys

import pytest
import tensorflow as tf
from helpers import forking

from tfdpsq.data.io import atomic_directory, atomic_file
from tfdpsq.validation import InputError


def test_directory_appears_only_when_complete(tmp_path):
    target = tmp_path / "deep" / "out"
    with atomic_directory(target) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "a").write_text("text")
        assert partial.parent == target.parent  # Else the rename would copy.
        assert not target.exists()
    assert (target / "sub" / "a").read_text() == "text"
    assert os.listdir(target.parent) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_or_interrupted_writer_leaves_nothing(tmp_path, error):
    with pytest.raises(error), atomic_directory(tmp_path / "out") as partial:
        (partial / "a").write_text("half")
        raise error
    assert os.listdir(tmp_path) == []


def test_empty_directory_is_filled_and_taken_one_refused(tmp_path):
    target = tmp_path / "out"
    target.mkdir(mode=0o700)
    with pytest.raises(KeyError), atomic_directory(target):
        raise KeyError
    assert not list(target.iterdir()) and target.stat().st_mode & 0o777 == 0o700
    with atomic_directory(target) as partial:
        (partial / "a").write_text("first")
    with (
        pytest.raises(InputError, match="out: already exists"),
        atomic_directory(target),
    ):
        pytest.fail("the body ran")
    assert (target / "a").read_text() == "first"
    with (
        pytest.raises(InputError, match="a: already exists"),
        atomic_directory(target / "a"),
    ):
        pytest.fail("the body ran")


def test_readers_see_the_old_file_until_the_new_is_whole(tmp_path):
    file = tmp_path / "new" / "a"
    for old, pieces in ((None, "ab"), ("ab", "cd")):
        with atomic_file(file) as partial, open(partial, "w") as stream:
            for piece in pieces:
                stream.write(piece)
                stream.flush()
                assert (file.read_text() if file.exists() else None) == old
        assert file.read_text() == pieces
    with pytest.raises(RuntimeError), atomic_file(file) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert file.read_text() == "cd"
    assert os.listdir(file.parent) == ["a"]


# The nearest thing to a full disk that needs no rights: a write beyond the limit fails
# in the operating system, whichever library makes it. The limit ends with the code: the
# error that it ends in is written to a file as well.
LIMITED = """
import resource
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, before[1]))
try:
    exec({code!r})
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
"""
# TensorFlow's writer fails (long rows), or only the close does (short ones).
SET = """
from tfdpsq.data import SyntheticQuery, write_synthetic
rows = (SyntheticQuery(f"genQ{i}", "a query", f"d{i}", "word " * WORDS, 0)
        for i in range(3000))
write_synthetic("set", rows, {}, None, shards=1)
"""
WRITERS = {
    "file": (50_000, "io.atomic_write('a', b'x' * 100_000)"),
    "directory": (
        50_000,
        "with io.atomic_directory('out') as partial:\n"
        "    (partial / 'small').write_text('fits')\n"
        "    (partial / 'large').write_bytes(b'x' * 100_000)",
    ),
    "rows": (
        100_000,
        "import numpy as np\n"
        "from tfdpsq.data import write_rows\n"
        "write_rows('rows', ({'a': np.ones(1000)} for _ in range(100)))",
    ),
    "set of short rows": (300_000, SET.replace("WORDS", "20")),
    "set of long rows": (300_000, SET.replace("WORDS", "20_000")),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_full_disk_keeps_the_old_and_leaves_no_half(tmp_path, writer):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("old")
    limit, code = WRITERS[writer]
    script = LIMITED.format(limit=limit, code=f"from tfdpsq.data import io\n{code}")
    (tmp_path / "limited.py").write_text(script)
    command = [sys.executable, tmp_path / "limited.py"]
    done = forking.run(command, cwd=tmp_path / "out")
    assert "InputError" in done.stderr and "Free space there" in done.stderr
    assert os.listdir(tmp_path / "out") == ["a"]
    assert (tmp_path / "out" / "a").read_text() == "old"


def test_full_disk_is_reported_for_tensorflow_too(tmp_path):
    """TensorFlow has errors of its own."""
    full = tf.errors.ResourceExhaustedError(None, None, "x; No space left on device")
    with pytest.raises(InputError, match="Free space there"):
        with atomic_directory(tmp_path / "out"):
            raise full
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM"):
        with atomic_directory(tmp_path / "out"):
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
