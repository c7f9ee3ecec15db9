"""What is written appears whole or not at all, also when the disk is full."""

import errno
import os
import resource
import stat
import time

import pytest
import tensorflow as tf

from tfdpsq.data.files import (
    atomic_directory,
    atomic_file,
    atomic_write,
    check_writable,
    sha256_of_file,
)
from tfdpsq.validation import InputError


def test_a_directory_appears_only_when_it_is_complete(tmp_path):
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


def test_an_empty_directory_is_filled_and_a_taken_one_refused(tmp_path):
    target = tmp_path / "out"
    target.mkdir(mode=0o700)
    with pytest.raises(KeyError), atomic_directory(target):
        raise KeyError
    assert not list(target.iterdir()) and target.stat().st_mode & 0o777 == 0o700
    with atomic_directory(target) as partial:
        (partial / "a").write_text("first")
    with (
        pytest.raises(
            InputError,
            match="out: already exists, and is not an empty directory. Choose another",
        ),
        atomic_directory(target),
    ):
        pytest.fail("the body ran")
    assert (target / "a").read_text() == "first"
    with (
        pytest.raises(InputError, match="a: already exists"),
        atomic_directory(target / "a"),
    ):
        pytest.fail("the body ran")


@pytest.mark.parametrize("place", ["link", "dangling link", "mount point", "other's"])
def test_what_cannot_be_replaced_is_refused_before_the_body_runs(
    tmp_path, monkeypatch, place
):
    """An empty directory of somebody else under a sticky one cannot, for instance."""
    target, rename = tmp_path / "out", os.rename
    if place.endswith("link"):
        target.symlink_to(tmp_path / "real")
        if place == "link":
            (tmp_path / "real").mkdir()
    else:
        target.mkdir()
    if place == "mount point":
        monkeypatch.setattr(os.path, "ismount", lambda path: path == target)

    def refused(partial, to):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "rename", refused if place == "other's" else rename)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InputError, match="out: .*Choose a"):
        with atomic_directory(target):
            pytest.fail("the body ran")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_directory_taken_meanwhile_is_kept(tmp_path):
    target = tmp_path / "out"
    with (
        pytest.raises(InputError, match="already exists"),
        atomic_directory(target) as partial,
    ):
        (partial / "a").write_text("slow")
        target.mkdir()
        (target / "a").write_text("fast")
    assert (target / "a").read_text() == "fast"
    assert os.listdir(tmp_path) == ["out"]


def test_errors_of_the_body_that_are_not_about_the_disk_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_directory(tmp_path / "out"):
        (tmp_path / "missing").read_text()


def test_a_file_is_replaced_whole(tmp_path):
    file = tmp_path / "new" / "a.json"
    atomic_write(file, "é")
    assert file.read_bytes() == b"\xc3\xa9"
    atomic_write(file, b"\x00")
    assert file.read_bytes() == b"\x00"
    assert os.listdir(file.parent) == ["a.json"]


def test_a_file_written_piece_by_piece_is_seen_old_until_it_is_whole(tmp_path):
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


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path):
    left = tmp_path / ".a[1].json.0123456789ab.partial"
    other = tmp_path / ".a[1].json.5.0123456789ab.partial"  # of "a[1].json.5"
    for path in (left, other):
        path.write_text("half")
    with atomic_file(tmp_path / "a[1].json") as held:
        held.write_text("first")
        time.sleep(1.2)  # younger ones may be about to be locked
        with atomic_file(tmp_path / "a[1].json") as partial:
            partial.write_text("second")
        assert not left.exists() and other.exists() and held.exists()
    assert (tmp_path / "a[1].json").read_text() == "first"
    assert sorted(tmp_path.iterdir()) == [other, tmp_path / "a[1].json"]


def test_written_files_follow_the_umask(tmp_path):
    """Private temporary files must not make shared results unreadable."""
    old = os.umask(0o022)
    try:
        atomic_write(tmp_path / "a", "x")
        with atomic_directory(tmp_path / "d") as partial:
            (partial / "b").write_text("x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o755


def test_a_full_disk_keeps_the_old_file_and_leaves_no_half(tmp_path, run_limited):
    (tmp_path / "a").write_text("old")
    done = run_limited(
        "from tfdpsq.data.files import atomic_write\natomic_write('a', b'x' * 100_000)",
        50_000,
        tmp_path,
    )
    assert "InputError" in done.stderr and "Free space there" in done.stderr
    assert str(tmp_path / "a") in done.stderr
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_full_disk_leaves_no_half_directory(tmp_path, run_limited):
    done = run_limited(
        "from tfdpsq.data.files import atomic_directory\n"
        "with atomic_directory('out') as partial:\n"
        "    (partial / 'small').write_text('fits')\n"
        "    (partial / 'large').write_bytes(b'x' * 100_000)",
        50_000,
        tmp_path,
    )
    assert "InputError" in done.stderr and "Free space there" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_by_whatever_library_writes(tmp_path):
    """TensorFlow has errors of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    saved = tf.train.Checkpoint(weights=tf.Variable(tf.zeros([100_000])))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(
            InputError, match=r"out: cannot be written \(File too large"
        ):
            with atomic_directory(tmp_path / "out") as partial:
                saved.write(str(partial / "weights"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []
    full = tf.errors.ResourceExhaustedError(None, None, "x; No space left on device")
    with pytest.raises(InputError, match="Free space there"):
        with atomic_directory(tmp_path / "out"):
            raise full
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM"):
        with atomic_directory(tmp_path / "out"):
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")


def test_check_writable_creates_the_directory_and_leaves_it_empty(tmp_path):
    assert check_writable(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert os.listdir(tmp_path / "a" / "b") == []


def test_check_writable_names_a_path_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"file/out: cannot be written \(Not a dir"):
        check_writable(tmp_path / "file" / "out")


def test_check_writable_notices_a_full_disk(tmp_path, run_limited):
    done = run_limited(
        "from tfdpsq.data.files import check_writable\ncheck_writable('out')",
        1_000,
        tmp_path,
    )
    assert "InputError" in done.stderr and "Free space there" in done.stderr
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_closed_directory_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="Choose a directory you may write to"):
            check_writable(tmp_path)
        with pytest.raises(InputError, match="Choose a directory you may write to"):
            atomic_write(tmp_path / "a", "x")
    finally:
        tmp_path.chmod(0o700)


def test_sha256_of_file_is_the_published_one(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1.
    assert sha256_of_file(tmp_path / "abc") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
