"""Tests that the guarantee of an artefact is read at a URL, too, and never guessed.

TensorFlow reads `file://` URLs as local paths, and other schemes as file systems of
their own, of which `ram://` needs no service.
"""

import errno
import json
import math
import os

import pytest
import tensorflow as tf
from helpers import tiny as _tiny
from test_releases import _certificate, _stage

from tfdpsq.data import any_files
from tfdpsq.privacy import read_certificate
from tfdpsq.run import encode, index, synthesize
from tfdpsq.run.core import releases, workdir
from tfdpsq.run.core.releases import CERTIFIED, PRIVATE, PUBLIC, Output
from tfdpsq.validation import DataError, InputError

_PRIVATE = "whose guarantee is 'private'"


def _check(path, guarantee, base, module=synthesize, field="corpus"):
    """Checks a stage's settings, of which one is a path, for a released output."""
    config = module.default_config()
    config[field] = path
    output = Output(base / "release" / "out", guarantee, "test data")
    releases.check_lineage(output, workdir.plain(config))


@pytest.mark.parametrize("host", ["", "localhost"])
@pytest.mark.parametrize(
    ("module", "field"),
    [
        (synthesize, "corpus"),
        (synthesize, "generator"),
        (encode, "corpus"),
        (encode, "retriever"),
        (index, "corpus"),
        (index, "base"),
    ],
)
def test_a_file_url_does_not_hide_what_is_private(tmp_path, module, field, host):
    """Documents marked private were released as "public" queries."""
    given = (tmp_path, module, field)
    _stage(tmp_path / "made", PRIVATE)
    _stage(tmp_path / "certified", CERTIFIED, _certificate(2.0))
    old = tmp_path / "old"  # of a version that stated no guarantee
    old.mkdir()
    (old / "certificate.json").write_text(json.dumps(_certificate(math.inf)))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "file").symlink_to(tmp_path / "made" / "part" / "file")
    url = f"file://{host}{tmp_path}"
    for guarantee in (PUBLIC, CERTIFIED):
        for name in ("made", "made/part", "old", "links"):
            with pytest.raises(InputError, match=f"^{field} is file://.*{_PRIVATE}"):
                _check(f"{url}/{name}", guarantee, *given)
        _check(f"{url}/none", guarantee, *given)
    with pytest.raises(InputError, match="whose guarantee is 'certified'"):
        _check(f"{url}/certified", PUBLIC, *given)
    _check(f"{url}/certified", CERTIFIED, *given)


def test_synthesize_is_refused_before_it_writes_anything(tmp_path):
    data = tmp_path / "private" / "canaries" / "data"
    _tiny.write_pairs(data)
    (data / releases.MARK_FILE).write_text('{"guarantee": "private"}')
    config = synthesize.default_config()
    config.update(corpus=f"file://{data}", generator="t5_tiny_manuals")
    config.max_documents = 4  # were it not refused
    with pytest.raises(InputError, match=f"corpus is file://{data}, {_PRIVATE}"):
        synthesize.run(config, tmp_path / "release" / "synthetic")
    assert not (tmp_path / "release").exists()


def _write(place, name, value):
    tf.io.gfile.makedirs(place)
    with tf.io.gfile.GFile(f"{place}/{name}", "w") as file:
        file.write(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("name", ["stage.json", "manifest.json", "private.json"])
def test_what_a_directory_of_another_file_system_states_is_read(tmp_path, name):
    place = f"ram://lineage/{tmp_path.name}"
    _write(place, name, {"guarantee": "private"})
    for guarantee in (PUBLIC, CERTIFIED):
        for path in (place, f"{place}/"):
            with pytest.raises(InputError, match=f"corpus is ram://.*{_PRIVATE}"):
                _check(path, guarantee, tmp_path)
            # It holds for what is below, as on a disk; a nearer statement goes first.
            with pytest.raises(InputError, match=_PRIVATE):
                _check(f"{place}/part/file", guarantee, tmp_path)
    _write(f"{place}/part", name, {"guarantee": "public"})
    _check(f"{place}/part/file", PUBLIC, tmp_path)
    # Others state nothing.
    for path in (f"{place}-none", "https://host/path", "none://host/path", "ram://"):
        _check(path, PUBLIC, tmp_path)


_ERRORS = [
    tf.errors.UnavailableError(None, None, "503"),
    tf.errors.FailedPreconditionError(None, None, "Couldn't resolve host name"),
    tf.errors.DeadlineExceededError(None, None, "no answer"),
    OSError(errno.EIO, os.strerror(errno.EIO)),
]


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["stage.json", "certificate.json"])
def test_a_mark_that_cannot_be_read_is_not_taken_for_none(
    tmp_path, monkeypatch, error, name
):
    """A bucket that did not answer let private documents out as public queries."""
    place = f"ram://lineage/{tmp_path.name}"
    _write(place, "file", {})
    read = any_files.open_binary

    def fail(path):
        if os.fspath(path) == f"{place}/{name}":
            raise error
        return read(path)

    monkeypatch.setattr(any_files, "open_binary", fail)
    with pytest.raises(DataError, match=f"{place}/{name}: it cannot be read .*again"):
        _check(place, PUBLIC, tmp_path)
    if name == "stage.json":
        with pytest.raises(DataError, match="unknown whether its directory depends"):
            _check(f"{place}/file", PUBLIC, tmp_path)


def test_a_bucket_that_may_not_be_read_says_nothing_of_a_folder_in_it(
    tmp_path, monkeypatch
):
    """Rights on a folder alone are usual; those who have them cannot get others."""
    place = f"ram://lineage/{tmp_path.name}"
    _write(f"{place}/mine", "stage.json", {"guarantee": "certified"})
    _write(f"{place}/other", "file", {})
    read = any_files.open_binary

    def fail(path):
        if os.fspath(path).startswith((f"{place}/stage", f"{place}/other/stage")):
            raise tf.errors.PermissionDeniedError(None, None, "403")
        return read(path)

    monkeypatch.setattr(any_files, "open_binary", fail)
    _check(f"{place}/mine/file", CERTIFIED, tmp_path)
    _check(f"{place}/another", PUBLIC, tmp_path)
    with pytest.raises(
        DataError, match="other/stage.json: it cannot be read .403.*list"
    ):
        _check(f"{place}/other", PUBLIC, tmp_path)


@pytest.mark.parametrize("name", ["stage.json", "private.json", "manifest.json"])
@pytest.mark.parametrize("damaged", ['{"guarantee": "priv', "", b"\xff\xfe{"])
def test_a_damaged_mark_is_not_taken_for_none(tmp_path, name, damaged):
    """Documents beside a `private.json` that was cut short were released."""
    made = tmp_path / "made"
    (made / "part").mkdir(parents=True)
    mark = made / name
    mark.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    for place in (str(made), f"file://{made}/part", str(made / "part")):
        with pytest.raises(DataError, match=f"{mark}: it cannot be read"):
            _check(place, PUBLIC, tmp_path)
    if name == "stage.json":
        with pytest.raises(DataError, match=f"{mark}: it cannot be read"):
            read_certificate(made)
    mark.write_text("[]")  # of another program
    _check(str(made), PUBLIC, tmp_path)
    assert read_certificate(made) is None


def test_private_pairs_elsewhere_are_those_that_an_epsilon_protects(tmp_path):
    """Pairs from `import` are covered by ε; with another mark they are not."""
    place = f"ram://lineage/{tmp_path.name}"
    config = {"logs": {}, "columns": {}, "log_documents_are_public": True}
    _write(place, "stage.json", {"guarantee": "private", "config": config})
    for part in ("", "/queries.jsonl", "/qrels/train.tsv"):
        _check(f"{place}{part}", CERTIFIED, tmp_path)
    with pytest.raises(InputError, match=_PRIVATE):  # as on a disk
        _check(f"{place}/other/model", CERTIFIED, tmp_path)
    _write(place, "private.json", {"guarantee": "private"})
    with pytest.raises(InputError, match=_PRIVATE):
        _check(place, CERTIFIED, tmp_path)


@pytest.mark.parametrize(("epsilon", "allowed"), [(2.0, {CERTIFIED}), (math.inf, ())])
def test_a_certificate_elsewhere_is_read(tmp_path, epsilon, allowed):
    place = f"ram://lineage/{tmp_path.name}"
    _write(place, "certificate.json", _certificate(epsilon))
    for guarantee in (PUBLIC, CERTIFIED):
        if guarantee in allowed:
            _check(place, guarantee, tmp_path)
        else:
            with pytest.raises(InputError, match="corpus is ram://.*whose guarantee"):
                _check(place, guarantee, tmp_path)


def test_an_empty_certificate_elsewhere_promises_nothing(tmp_path):
    place = f"ram://lineage/{tmp_path.name}"
    _write(place, "certificate.json", {})
    with pytest.raises(InputError, match=_PRIVATE):
        _check(place, CERTIFIED, tmp_path)
