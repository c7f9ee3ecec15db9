"""Inputs of stages: what is known of an artefact by its record and certificate alone.

`path(KIND)` in a stage's settings names the kind; `common.kinds` has them. The runner
opens every path before the stage runs, and reads no weight and no query: so opening
also works for an output that an earlier step of a pipeline has yet to make, its
*promise*. Of both it is known where they are, their privacy class, and the facts that
the stage states of itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

from tfdpsq import privacy
from tfdpsq.data import io
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.frame import places, records
from tfdpsq.run.frame.places import Privacy
from tfdpsq.validation import InputError

# Says that a directory is private where it is used, and copied, without its stage's.
MARK_FILE = "private.json"
_STATING = (records.STAGE_FILE, "manifest.json", MARK_FILE)


@dataclasses.dataclass(frozen=True)
class Artefact:
    """An input: a stage's output, public data, or private pairs.

    Attributes:
      path: where it is, or one of `words`.
      privacy: its class; of raw private pairs PRIVATE.
      certificate: of what private queries it was made from; `None` for public content,
        raw pairs and promises.
      facts: what its stage states of it.
      origin: tells its guarantee from others: a digest, or the promising step; "" for
        none.
      promised: whether it has yet to be made.
      wanted: the kind in words, for errors.
      files: names of which one is there where the kind is; "" is the path itself.
      words: what stands for public content instead of a path.
    """

    path: str
    privacy: Privacy
    certificate: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    origin: str = ""
    promised: bool = False

    wanted: ClassVar[str] = "the output of a stage"
    files: ClassVar[tuple[str, ...]] = (records.STAGE_FILE,)
    words: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def open(cls, path: str, setting: str) -> Artefact:
        """Opens what is at a path; `setting` names it in errors.

        Raises:
          InputError: there is no artefact of this kind.
          DataError: its record or certificate is damaged.
        """
        if path in cls.words:
            return cls(path, Privacy.PUBLIC)
        if not cls.is_at(path):
            raise InputError(f"{setting} is {path!r}. Give {cls.wanted}.")
        above = os.path.dirname(path)  # whose record is that of a part of it, too
        stage = records.read_stage(path) or records.read_stage(above) or {}
        privacy_class, certificate = class_stated(path), None
        has_one = (pathlib.Path(path) / certificates.FILE_NAME).is_file()
        if has_one or privacy_class < Privacy.PRIVATE:  # private results need none
            certificate = privacy.read_certificate(path)
        return cls(
            path,
            max(privacy_class, records.class_of_certificate(certificate)),
            certificate,
            stage.get("facts", {}),
            certificate["digest"] if certificate else "",
        )

    @classmethod
    def is_at(cls, path: str) -> bool:
        """Returns whether the kind is at a path."""
        return any((pathlib.Path(path) / name).exists() for name in cls.files)

    @classmethod
    def promised_by(cls, promise: Artefact, path: str) -> Artefact:
        """Returns the promise of another step as one of this kind, at a path in it."""
        return cls(**{**vars(promise), "path": path})

    def fingerprint(self, private: pathlib.Path) -> str:
        """Returns an id of the content that may be released.

        Args:
          private: the directory of the key, for private pairs.
        """
        if self.path in self.words:
            return self.path
        stage = records.read_stage(self.path)
        if stage is None:
            return f"files:{_digest_of_files(self.path)}"
        return f"{stage['fingerprint']}/{stage['run']}"


def class_stated(path: str) -> Privacy:
    """Returns the class that is stated for a path; PUBLIC where nothing is.

    The nearest directory that states one decides: the path, or one above it. What lies
    in the private directory of a workdir is private, whatever it is.
    """
    place = pathlib.Path(os.path.abspath(path))
    for folder in (place, *place.parents):
        files = [folder / name for name in _STATING if (folder / name).is_file()]
        remedy = "Restore it: it says what may be released"
        words = [io.read_json(file, remedy).get("guarantee") for file in files]
        if any(words):
            return max(Privacy[word.upper()] for word in words if word)
        if folder.name == places.PRIVATE and (folder / records.KEY_FILE).is_file():
            return Privacy.PRIVATE
    return Privacy.PUBLIC


def _digest_of_files(path: str) -> str:
    """Returns the SHA-256 of all files but descriptions and a downloader's notes."""
    root, found = pathlib.Path(path), hashlib.sha256()
    files = [root] if root.is_file() else sorted(root.rglob("*"))
    for file in files:
        name = file.relative_to(root).as_posix()
        skipped = file.suffix == ".md" or file.name == "pretraining.json"
        if file.is_file() and not skipped and not name.startswith(".cache/"):
            found.update(f"{name}\0{io.sha256_of_file(file)}\0".encode())
    return found.hexdigest()
