"""Decides where an output may go by its guarantee, with one rule for all stages.

| guarantee   | holds for                                | under `release/` | mode  |
|-------------|------------------------------------------|------------------|-------|
| "public"    | what comes from public documents alone   | allowed          | umask |
| "certified" | what carries a certificate of finite ε   | allowed          | umask |
| "private"   | all else that depends on private queries | refused          | 0600  |

A path is *released* if it has a directory called `release` in it, under any spelling:
symbolic links are followed, also those in a `file://` URL. Below it, no output is in a
directory called `private` or one with a dot before its name: anybody who lists a
release passes over both. A stage states its guarantee in an `Output` before it reads or
spends anything, and can write nowhere else (see `outputs`). Its result is compared with
the statement and appears only if the two agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Union

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import io
from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.core import layout

PUBLIC, CERTIFIED = "public", "certified"
PRIVATE = certificates.PRIVATE
# From the one that may go anywhere to the one that stays private.
GUARANTEES = (PUBLIC, CERTIFIED, PRIVATE)
RELEASE_FOLDER, PRIVATE_FOLDER = "release", "private"
# Bytes: a temporary file has 22 more, and a file name at most 255.
_LONGEST_NAME = 200
STAGE_FILE = "stage.json"
# States the guarantee of a directory that is used, and copied, without its stage's.
MARK_FILE = "private.json"
# Files of a directory that state its guarantee; a set's own manifest is one.
_STATING = (STAGE_FILE, "manifest.json", MARK_FILE)
# Settings that only `import` has.
_OF_IMPORT = {"logs", "columns", "log_documents_are_public"}
# Directories that a command which was killed did not finish: never released.
UNFINISHED = re.compile(r"\.(.+)\.([0-9a-f]{12}\.partial|state|shards)")
# As many links as Linux follows.
_MOST_LINKS = 40

# A local path, or one of another file system, which `pathlib.Path` would corrupt.
Place = Union[str, pathlib.Path]


@dataclasses.dataclass(frozen=True)
class Output:
    """A place to write to, and the guarantee of what is written there.

    Attributes:
      place: the directory or file.
      guarantee: one of `GUARANTEES`.
      holds: description of the content, for the error.
      private_directory: the private directory if one was set; else "".
      unused: settings that name something private that the output does not use.

    Raises:
      InputError: a private output in a released place, or a private directory in one;
        or another one in a place of a release that looks private or hidden; or one
        where runs or logs are kept.
    """

    place: Place
    guarantee: str
    holds: str
    private_directory: str = ""
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Applies the rule, before anything is read, made or spent."""
        validation.one_of("guarantee", self.guarantee, GUARANTEES)
        require_short(os.fspath(self.place).rstrip("/").rpartition("/")[2])
        if self.private_directory:
            private_directory(self.place, self.private_directory)
        if self.guarantee == PRIVATE and is_released(self.place):
            raise validation.InputError(
                f"{self.place} is under {RELEASE_FOLDER}/, but would hold "
                f"{self.holds}, which must stay private. Write it to "
                f"{_remedy(self.place)} instead."
            )
        hidden = hidden_in_release(self.place)
        if hidden:
            raise validation.InputError(
                f"{self.place} is under {RELEASE_FOLDER}/, in {hidden!r}, which says "
                f"that it is private or hidden. Leave {hidden!r} out of its path."
            )
        place = pathlib.Path(os.fspath(self.place))
        private = place / PRIVATE_FOLDER
        with contextlib.suppress(validation.InputError):  # it needs none, and has none
            private = private_directory(self.place, self.private_directory)
        _require_apart(place, private)

    @property
    def directory(self) -> pathlib.Path:
        """Returns the place as a local path.

        Raises:
          InputError: it is not local.
        """
        return local_path(self.place)

    @property
    def owner_only(self) -> bool:
        """True if only the owner may read it."""
        if self.guarantee == PRIVATE:
            return True
        return is_under_private(self.place, self.private_directory)


def _require_apart(place: pathlib.Path, private: pathlib.Path) -> None:
    """Refuses the place of what stages keep while they make their output.

    Runs and logs are written as an output is made; the output could not take their
    place, when all was paid.
    """
    real = map(os.path.realpath, (place, private))
    below = pathlib.Path(os.path.relpath(*real)).parts
    if below[:1] in ((layout.RUNS,), (layout.LOGS,)):
        raise validation.InputError(
            f"{place} is where {below[0]} of {private} are kept. Use another --workdir."
        )


# -- Places ----------------------------------------------------------------------


def require_short(name: str) -> None:
    """Refuses a name of an output with which its temporary files could not be named.

    Raises:
      InputError: it has more than 200 bytes; a file name has at most 255.
    """
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise validation.InputError(
            f"an output would be called {validation.shown(name)}, of "
            f"{len(os.fsencode(name))} bytes. Give a name of at most {_LONGEST_NAME}."
        )


def local_path(place: Place) -> pathlib.Path:
    """Returns a place as a path of this machine.

    Raises:
      InputError: it is elsewhere.
    """
    if not io.is_local(place):
        raise validation.InputError(
            f"workdir is {place}; this stage writes to local paths only. Give a local "
            "path, or a directory where that file system is mounted."
        )
    return pathlib.Path(place)


def is_released(place: Place) -> bool:
    """Returns whether a path, links followed, has a directory called `release`."""
    return any(RELEASE_FOLDER in name.split("/") for name in spellings(place))


def hidden_in_release(place: Place) -> str:
    """Returns the first name below `release` that is `private` or has a dot before it.

    Links are followed; it is "" where there is none.
    """
    for path in spellings(place):
        names = path.split("/")
        below = (
            names[names.index(RELEASE_FOLDER) + 1 :] if RELEASE_FOLDER in names else ()
        )
        for name in below:
            if name == PRIVATE_FOLDER or name.startswith("."):
                return name
    return ""


def private_directory(place: Place, given: str = "") -> pathlib.Path:
    """Returns where a stage keeps what must not be released with its output.

    | the output                      | the private directory |
    |---------------------------------|-----------------------|
    | `X/release/...`                 | `X/private`           |
    | `X/private/NAME`                | `X/private`           |
    | `X/NAME`                        | `X/private`           |

    `given` is the directory that was set, or "".

    Raises:
      InputError: it would be released; or none was set for an output that is not local.
    """
    if given and not given.strip():
        raise validation.InputError(
            f"private_directory is {given!r}, which is white space. Set it to a "
            'directory, or to "".'
        )
    if given:
        given = os.fspath(given)
        if not io.is_local(given):
            raise validation.InputError(
                f"private_directory is {given}; keys and ledgers are kept on this "
                "machine. Set it to a local directory, or to what is mounted as one."
            )
        if is_released(given):
            raise validation.InputError(
                f"private_directory is {given}, under {RELEASE_FOLDER}/, where keys "
                "and ledgers would be released. Set it to a directory that is not, or "
                'to "".'
            )
        return pathlib.Path(given)
    place = os.fspath(place)
    if not io.is_local(place):
        raise validation.InputError(
            f"workdir is {place}, where private things cannot be kept. Set "
            "private_directory to a directory of this machine."
        )
    parent = pathlib.Path(place).parent
    found = [parent if parent.name == PRIVATE_FOLDER else parent / PRIVATE_FOLDER]
    for name in spellings(place):
        parts = name.split("/")
        if RELEASE_FOLDER in parts:
            above = "/".join(parts[: parts.index(RELEASE_FOLDER)]) or "/"
            found.append(pathlib.Path(above) / PRIVATE_FOLDER)
    for directory in found:
        if not is_released(directory):
            return directory
    raise validation.InputError(
        f"{place} is released, and so is {found[-1]}, where its keys and ledgers would "
        "be kept. Set private_directory to a directory that is not, or use another "
        "workdir."
    )


def spellings(place: Place) -> Iterator[str]:
    """Yields a path as given, with one link after another resolved, and its real name.

    The path need not exist.
    """
    path = os.fspath(place)
    if not io.is_local(path):
        yield path
        return
    real = os.path.realpath(path)
    path = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        yield path
        parts = path.split("/")
        heads = ("/".join(parts[:end]) for end in range(2, len(parts) + 1))
        link = next(filter(os.path.islink, heads), None)
        if link is None:
            break
        target = os.path.join(os.path.dirname(link), os.readlink(link))
        path = os.path.normpath(target + path[len(link) :])
    yield real


def is_under_private(place: Place, given: str = "") -> bool:
    """Returns whether a path is in `given` or in a directory called `private`."""
    place = os.fspath(place)
    if not io.is_local(place) or is_released(place):
        return False
    real = os.path.realpath(place)
    given = os.fspath(given)
    under = bool(given) and real.startswith(os.path.realpath(given) + "/")
    return under or PRIVATE_FOLDER in real.split("/")


def is_inside(place: str | os.PathLike, folder: str | os.PathLike) -> bool:
    """Returns whether a local path is below a folder, links followed.

    Unlike `pathlib.Path.resolve`, it takes links that lead to themselves.
    """
    above = pathlib.Path(os.path.realpath(folder))
    return above in pathlib.Path(os.path.realpath(place)).parents


def _remedy(place: Place) -> str:
    path = os.fspath(place).rstrip("/")
    name = path.rpartition("/")[2]
    if io.is_local(place):
        with contextlib.suppress(validation.InputError):
            return str(private_directory(place) / name)
        return f"a directory without {RELEASE_FOLDER}/ in its path"
    return path.replace(f"/{RELEASE_FOLDER}/", f"/{PRIVATE_FOLDER}/")


# -- Guarantees ------------------------------------------------------------------


def guarantee_of(certificate: Mapping[str, Any] | None, *made_from: str) -> str:
    """Returns the guarantee of what is made from artefacts and public data.

    `certificate` is the one that applies, see `certificates.inherited_certificate`;
    `made_from` are local directories of the artefacts, "" for none.
    """
    if any(stated(path) == PRIVATE for path in made_from if path):
        return PRIVATE
    if certificate is None:
        return PUBLIC
    return CERTIFIED if _is_finite(certificate) else PRIVATE


def stated(path: str | os.PathLike, raw_pairs: bool = True) -> str | None:
    """Returns the guarantee that is stated for a path; `None` where none is.

    Of each place that its links lead to, by the nearest directory that states one: a
    stage's output or a set that the place is, or is in. If they differ, the strictest.

    `raw_pairs=False` passes over private pairs as `import` wrote them: like those of
    any BEIR directory, they are what an epsilon protects.

    Raises:
      DataError: a file that would state it cannot be read.
    """
    found = set()
    for place in places_of(path):
        for folder in (place, *place.parents):
            states = marked(folder)
            if states is not None:
                if raw_pairs or folder != _folder(place) or not _is_imported(folder):
                    found.add(states)
                break
    return max(found, key=GUARANTEES.index, default=None)


def marked(folder: pathlib.Path) -> str | None:
    """Returns the strictest guarantee that files directly in a directory state.

    Raises:
      DataError: one of them is there and cannot be read: see `_mark`.
    """
    found = (_mark(folder / name) or {} for name in _STATING)
    stating = (values.get(certificates.GUARANTEE) for values in found)
    known = [each for each in stating if each in GUARANTEES]
    return max(known, key=GUARANTEES.index, default=None)


def _mark(path: str | os.PathLike, above: bool = False) -> dict[str, Any] | None:
    """Reads the JSON object of a file that states a guarantee; `None` if missing.

    Args:
      path: the file, on any file system that TensorFlow knows.
      above: whether it is in a directory above the place in question. That may be
        somebody else's, so a file that may not be read there counts as missing.

    Raises:
      DataError: it exists and cannot be read. The guarantee of its directory is then
        unknown, and nothing derived from it may be released.
    """
    absent = (
        FileNotFoundError,
        NotADirectoryError,
        IsADirectoryError,
        tf.errors.NotFoundError,
    )
    no_place = (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError)
    forbidden = (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError)
    try:
        with io.open_binary(path) as file:
            values = validation.parse_json(file.read())
    except (*absent, *no_place):  # its own reader says what is wrong with such a place
        return None
    except (OSError, tf.errors.OpError, ValueError) as error:
        if io.is_local(path) and not os.path.lexists(path):
            return None  # no name of a file, or in a directory that cannot be searched
        if isinstance(error, forbidden) and above:
            return None
        reason = getattr(error, "message", None) or getattr(error, "strerror", None)
        remedy = (
            "Run the same command again if the failure is temporary; otherwise restore "
            "the file, or move it away if another program wrote it."
        )
        if isinstance(error, (PermissionError, *forbidden)):
            remedy = "Get the rights to read and list there, or work on a copy of it."
        raise validation.DataError(
            path,
            f"it cannot be read ({validation.cut(str(reason or error))}), so it is "
            "unknown whether its directory depends on private queries",
            remedy,
        ) from error
    return values if isinstance(values, dict) else None


def places_of(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields all places of a local path, links followed, and of links directly in it.

    A directory of links to another one's files is the other one.
    """
    path = os.fspath(path)
    if not io.is_local(path):
        return
    for name in spellings(os.fspath(path)):
        yield pathlib.Path(name)
    with contextlib.suppress(OSError):  # a file, or missing
        for entry in sorted(pathlib.Path(path).iterdir()):
            if entry.is_symlink():
                yield pathlib.Path(os.path.realpath(entry))


def _folder(place: pathlib.Path) -> pathlib.Path:
    """Returns the BEIR directory that a place is, or is a part of."""
    folder = place if place.is_dir() else place.parent
    return folder.parent if folder.name == "qrels" else folder


def _is_imported(folder: pathlib.Path) -> bool:
    """Returns whether a directory holds private pairs as `import` wrote them."""
    config = certificates.stated(folder / STAGE_FILE, "config")
    marks = (*_STATING[1:], certificates.FILE_NAME)
    return (
        isinstance(config, dict)
        and config.keys() >= _OF_IMPORT
        and not any((folder / name).exists() for name in marks)
    )


def _stated_elsewhere(path: str) -> str | None:
    """Returns what is stated for a place of another file system, as `stated` does.

    A certificate counts, too, if it is in the place itself. Private pairs as `import`
    wrote them are passed over.

    Raises:
      DataError: a file that would state it cannot be read.
    """
    scheme, _, rest = path.rstrip("/").partition("://")
    parts = rest.split("/")
    for depth in range(len(parts), 0, -1):
        folder, above = f"{scheme}://{'/'.join(parts[:depth])}", depth < len(parts)
        read = {name: _mark(f"{folder}/{name}", above) for name in _STATING}
        found = {name: values for name, values in read.items() if values is not None}
        config = found.get(STAGE_FILE, {}).get("config")
        inside = parts[depth:]  # of a BEIR directory, as in `_folder`
        of_beir = len(inside) <= 1 or inside[:-1] == ["qrels"]
        imported = isinstance(config, dict) and _OF_IMPORT <= config.keys() and of_beir
        known = [
            values[certificates.GUARANTEE]
            for values in found.values()
            if values.get(certificates.GUARANTEE) in GUARANTEES
        ]
        certificate = None if above else _mark(f"{folder}/{certificates.FILE_NAME}")
        if certificate is not None:
            known.append(guarantee_of(certificate))
        elif imported and found.keys() == {STAGE_FILE}:
            return None
        if known:
            return max(known, key=GUARANTEES.index)
    return None


def check_lineage(output: Output, config: Any) -> None:
    """Refuses an output that would claim more than the artefacts it is made from.

    `config` has the settings as JSON values; any may be an artefact's directory, also
    a `file://` URL of one, or a directory of another file system.
    """
    for key, path in _named(config):
        if key in (*output.unused, "private_directory"):
            continue
        found = _found_at(os.fspath(path))
        if found is None:
            continue
        if GUARANTEES.index(found) > GUARANTEES.index(output.guarantee):
            raise validation.InputError(
                f"{key} is {path}, whose guarantee is {found!r}: what is made from it "
                f"cannot be {output.guarantee!r}. Start from public weights or data "
                "instead, or set epsilon to inf and write to a private directory."
            )


def _found_at(path: str) -> str | None:
    """Returns the guarantee of the artefact at a path; `None` if none is known there.

    Private pairs as `import` wrote them are passed over.
    """
    if not io.is_local(path):
        return _stated_elsewhere(path)
    if not os.path.isdir(path):
        return None
    found = stated(path, raw_pairs=False)
    if found != PRIVATE and (pathlib.Path(path) / certificates.FILE_NAME).is_file():
        found = guarantee_of(read_certificate(path))
    return found


def _named(config: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from _named(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _named(value, key)
    elif isinstance(config, str) and config and "\0" not in config:
        yield key, config


def check_made(directory: pathlib.Path, output: Output) -> None:
    """Compares what was made with what was stated.

    Raises:
      InputError: a public output has a certificate; or a certified one has none, one of
        infinite ε, or several.
    """
    if output.guarantee == PRIVATE:
        return
    found = {}
    for path in sorted(directory.rglob(certificates.FILE_NAME)):
        certificate = read_certificate(path.parent)
        assert certificate is not None
        found[certificate["digest"]] = certificate
    problem = None
    if output.guarantee == PUBLIC:
        if found:
            problem = "it carries a certificate: private queries had a part in it"
    elif not found:
        problem = "it carries no certificate"
    elif len(found) > 1:
        problem = "it carries certificates of different runs, which would add up"
    elif not all(map(_is_finite, found.values())):
        problem = "its certificate is of an infinite epsilon"
    if problem:
        raise validation.InputError(
            f"{output.place} was to be {output.guarantee}, but {problem}. Nothing was "
            "written there; please report this."
        )


def _is_finite(certificate: Mapping[str, Any]) -> bool:
    try:
        epsilon = float(certificate["guarantee"]["epsilon"])
    except (KeyError, TypeError, ValueError):
        return False
    return certificate.get("private") is True and math.isfinite(epsilon)
