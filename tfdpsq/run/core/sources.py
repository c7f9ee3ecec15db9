"""Sources of training pairs: private BEIR splits, and sets that are free to use.

The data themselves show whether a set is private, which decides what its use costs: a
directory with a manifest is synthetic or public, and its certificate states what it
already cost; the queries of a BEIR directory are private.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import hmac
import os
import pathlib
import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import (
    BeirDirectory,
    build_pydocs,
    io,
    read_manifest,
    read_synthetic,
    tables,
)
from tfdpsq.data.beir import PairTable
from tfdpsq.data.sets import BEIR, PART_FILE, SCHEMA
from tfdpsq.data.texts import Document, Pair, documents_fingerprint
from tfdpsq.data.tokenization import VOCABULARY_FILE, Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.privacy import read_certificate, read_ledger
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof.certificate import FILE_NAME as CERTIFICATE
from tfdpsq.privacy.proof.ledger import FILE_NAME as LEDGER
from tfdpsq.privacy.proof.ledger import READS_FILE_NAME as READS
from tfdpsq.run.core import (
    layout,
    outputs,
    point_log,
    releases,
    workdir,
)

PYDOCS = "pydocs"
KEY_FILE = "fingerprint.key"
_KEYED = "keyed:"
_SCHEMA = "schema"
_TOP_OF_BEIR = ("corpus.jsonl", "corpus.jsonl.gz", "qrels")


@dataclasses.dataclass(frozen=True)
class Source:
    """Pairs to train on.

    Attributes:
      path: "pydocs", a BEIR directory or a set.
      split: name of the qrels of private pairs.
      count: number of pairs.
      read: streams them from disk. Private pairs come one per unit, a query or a pair;
        a set is checked against its checksums first.
      private: whether these are private pairs. Only they can be trained on under DP,
        since each unit is in one row only (a user in rows that are known).
      certificate: of the synthetic set; `None` for public and for private pairs.
      table: private pairs, on disk.
    """

    path: str
    split: str
    count: int
    read: Callable[[], Iterator[Pair]]
    private: bool
    certificate: dict[str, Any] | None
    table: PairTable | None = None

    @functools.cached_property
    def pairs(self) -> Sequence[Pair]:
        """Returns all pairs: private ones on disk, those of a set in memory."""
        return self.table if self.table is not None else list(self.read())


def open_beir(path: str, as_published: bool = False) -> BeirDirectory:
    """Opens a BEIR directory, or the embedded corpus for "pydocs".

    See `BeirDirectory` for `as_published`.

    Raises:
      DataError: the directory lacks a file.
      InputError: it is a log; or inside a synthetic set, whose rows are not private
        pairs: one private query can influence all of them.
    """
    if path == PYDOCS:
        return build_pydocs()
    for inner in (layout.SET, layout.PUBLIC_PAIRS):
        if tf.io.gfile.exists(f"{path}/{inner}/manifest.json"):
            raise validation.InputError(
                f"{path} is the output of a stage, and its set is {path}/{inner}: "
                "give that."
            )
    if is_log(path):
        raise validation.InputError(
            f"{path} is a log, not a BEIR directory. Run: tfdpsq import "
            f"--workdir=private/pairs --config.logs.train={shlex.quote(path)} (its "
            "columns by --config.columns.query=NAME and so on), and give private/pairs "
            "here; only `pipeline` takes a log as it is."
        )
    part = _part_of_a_set(path)
    if part is not None:
        raise validation.InputError(
            f"{path} is part of a synthetic or public set ({part}). Give the set "
            "itself, whose certificate says what it cost."
        )
    return BeirDirectory(path, as_published)


def is_log(path: str) -> bool:
    """Returns whether a path is a table that `import` reads, such as a Parquet file."""
    if path == PYDOCS or path.startswith(tables.NAMED):
        return path != PYDOCS
    if not tf.io.gfile.isdir(path):
        return tables.format_of(path) is not None
    beir = ("corpus.jsonl", "queries.jsonl", "qrels", "manifest.json")
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(path)]
    if any(name.removesuffix(".gz") in beir for name in names):
        return False
    walked = tf.io.gfile.walk(path)
    return any(tables.format_of(name) for _, _, names in walked for name in names)


def _part_of_a_set(path: str) -> pathlib.Path | None:
    """Returns the file by which a directory's or file's rows are known to be a set's.

    That is the directory that a set is copied to for other programs, or a part of it.
    """
    for place in releases.places_of(path):
        for folder in (place, *place.parents[:2]):
            if (folder / PART_FILE).is_file():
                return folder / PART_FILE
            # Sets of older versions have no such file.
            manifest = folder.parent / "manifest.json"
            if folder.name == BEIR and certificates.stated(manifest, _SCHEMA) == (
                SCHEMA
            ):
                return manifest
    return None


def why_not_public(path: str, raw_pairs: bool = True) -> str | None:
    """Returns what shows that a file is private or was made from what is, or `None`.

    It continues a sentence that begins with the path. `raw_pairs=False` passes over
    private queries as somebody collected them: an epsilon protects those.
    """
    found = releases.stated(path, raw_pairs)
    if found not in (None, releases.PUBLIC):
        return f"depends on private queries: its guarantee is {found!r}"
    part = _part_of_a_set(path)
    for place in releases.places_of(path):
        of_a_set = part or next(filter(_is_set, place.parents), None)
        if of_a_set:
            if found != releases.PUBLIC:
                return f"is part of a synthetic set ({of_a_set})"
        elif raw_pairs and found is None and (problem := _why_private(place)):
            return problem
    return None


def _why_private(place: pathlib.Path) -> str | None:
    """Returns what the place of a file shows to be private; see `why_not_public`."""
    name, folder = place.name, place.parent
    if name.startswith("queries.jsonl"):
        return (
            "holds the queries of a BEIR directory, not documents, which are in "
            "corpus.jsonl"
        )
    if folder.name == "qrels":
        return "holds judgements, which show what documents private queries have"
    if name in layout.JOB_FILES and (folder / workdir.CONFIG_FILE).is_file():
        return "is of a job and shows private queries and measures on them"
    of_log = (point_log.FILE_NAME, layout.CURVE_FILE)
    if name in (LEDGER, READS) or name.startswith(layout.EVENTS):
        return "is a record of a private training run"
    if name in of_log and folder.parent.name == layout.LOGS:
        return "is a log of training, with losses on private queries"
    for above in (place, *place.parents):
        if above.name == releases.PRIVATE_FOLDER and any(
            (above / each).exists() for each in outputs.PRIVATE_FILES
        ):
            return f"is in {above}, where stages keep what must stay private"
    return None


def _is_set(folder: pathlib.Path) -> bool:
    """Returns whether a directory is a set; one with a damaged manifest is, too."""
    schema = certificates.stated(folder / "manifest.json", _SCHEMA)
    known = schema in (None, SCHEMA) or (folder / CERTIFICATE).is_file()
    return known and is_free(str(folder))


def corpus_fingerprint(path: str) -> str:
    """Returns the SHA-256 of a corpus's documents; no query enters."""
    beir = open_beir(path)
    return documents_fingerprint(beir.documents())


def source_fingerprint(path: str, private_directory: pathlib.Path) -> str:
    """Returns an id of a source's content that may be released.

    With a plain hash of private pairs, anybody who knows all pairs but one could test
    guesses at the last, which no ε covers. The hash is therefore keyed: only the owner
    of the key can compare data with it.

    The key is in `private_directory`, made on first use.
    """
    if is_free(path):
        return read_manifest(path)["fingerprint"]
    return keyed_fingerprint(open_beir(path).fingerprint(), private_directory)


def keyed_fingerprint(fingerprint: str, private_directory: pathlib.Path) -> str:
    """Returns the HMAC-SHA256 of a fingerprint under this workdir's secret key.

    Raises:
      DataError: the key is damaged; or it is missing, and steps were paid for data
        whose fingerprint was made with it.
    """
    path = outputs.open_private(private_directory) / KEY_FILE
    if not path.is_file():
        _require_no_paid_run(private_directory, path)
        own = private_directory / f".{KEY_FILE}.{secrets.token_hex(6)}"
        with outputs.owner_only():
            io.atomic_write(own, secrets.token_hex(32))
        try:
            os.link(own, path)
        except FileExistsError:
            pass  # commands that start together all take the first one's key
        except OSError:  # this file system has no links
            os.replace(own, path)
        own.unlink(missing_ok=True)
    # An empty key would make a plain hash of it, on which guesses can be tested.
    written = path.read_bytes().strip()
    if not re.fullmatch(rb"[0-9a-f]{64}", written):
        raise validation.DataError(
            path,
            "it does not hold a key of 64 hexadecimal digits",
            "Restore it from a backup: without it, nobody can tell whether data are "
            "those that were trained on.",
        )
    key = bytes.fromhex(written.decode())
    return _KEYED + hmac.new(key, fingerprint.encode(), hashlib.sha256).hexdigest()


def _require_no_paid_run(private_directory: pathlib.Path, key: pathlib.Path) -> None:
    """Refuses to make a key where it would call the data of a paid run other data."""
    # Not recursive: another job's workdir below this one has its own key.
    for path in sorted((private_directory / workdir.RUNS).glob(f"*/{LEDGER}")):
        found = read_ledger(path)
        if found.steps_paid and found.data.startswith(_KEYED):
            raise validation.DataError(
                key,
                f"it is missing, but {found.steps_paid} steps are paid in {path} for "
                "data that only this key can tell from others",
                "Restore it from a backup, or use another workdir: what is spent there "
                "adds to what is spent here.",
            )


@functools.cache
def fetched(path: str) -> str:
    """Returns the local path of a model's directory or of a file.

    Something on another file system is copied, once per process, to a temporary
    directory that the process removes at its end.

    Raises:
      InputError: there is nothing at the path.
    """
    if io.is_local(path):
        return path
    folder = tempfile.mkdtemp(prefix="tfdpsq-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = f"{folder}/{path.rstrip('/').rpartition('/')[2]}"
    try:
        if tf.io.gfile.isdir(path):
            io.copy_tree(path, target)
        else:
            tf.io.gfile.copy(path, target)
    except (FileNotFoundError, tf.errors.NotFoundError) as error:
        raise validation.InputError(
            f"{path}: there is no such file or directory. Give another path."
        ) from error
    except tf.errors.OpError as error:
        reason = str(error.message).partition("\n")[0][:200]
        raise validation.InputError(
            f"{path} cannot be read ({reason}). Give a path that can, or copy it first."
        ) from error
    return target


def vocabulary_file(given: str, model: str = "") -> pathlib.Path:
    """Returns the SentencePiece model: the one given, or the one in a model.

    `given` and `model` may be "".

    Raises:
      InputError: neither exists.
    """
    if given:
        return pathlib.Path(fetched(given))
    found = _vocabulary_in(model) if model else None
    if found is not None:
        return found
    raise validation.InputError(
        f"no vocabulary was given, and {model or 'a model of random weights'} has no "
        f"{VOCABULARY_FILE}. Set vocabulary to the model's SentencePiece file."
    )


def _vocabulary_in(model: str) -> pathlib.Path | None:
    """Finds the vocabulary of a T5, or of an output of `train_retriever`."""
    located = checkpoints.locate(model)
    found = map(checkpoints.vocabulary_in, (located, located / layout.RETRIEVER_MODEL))
    return next(filter(None, found), None)


def require_own_vocabulary(
    setting: str, given: object, tokenizer: Tokenizer, model: str
) -> None:
    """Refuses a vocabulary other than a model's own, where it has one.

    With another one of no more pieces all would run, on words that mean others.

    The error names `setting` and its value `given`. `model` is as for
    `vocabulary_file`.
    """
    own = _vocabulary_in(model) if model else None
    if own and Tokenizer(own).fingerprint != tokenizer.fingerprint:
        raise validation.InputError(
            f"{setting} is {given}, but {model} was trained with another vocabulary, "
            f"{own}. Leave {setting} at ''."
        )


def generator_fingerprint(setting: str, path: str) -> str:
    """Returns the id of a generator, with its vocabulary, prompt and lengths.

    Raises:
      InputError: it is missing, no generator, or has no vocabulary that fits; names
        `setting`.
      DataError: a damaged certificate.
    """
    try:
        if not path:
            raise validation.InputError("there is none.")
        located = checkpoints.locate(path)
        shape = checkpoints.open_checkpoint(located).config  # its headers
        vocabulary = checkpoints.vocabulary_in(located)
        if vocabulary is None:
            raise validation.InputError(f"{located} has no {VOCABULARY_FILE}.")
        Tokenizer(vocabulary).require_embeddings(shape.vocabulary_size)
    except validation.InputError as error:
        raise validation.InputError(
            f"{setting} is {path!r}, which is not a generator: {error} Give what "
            "finetune wrote, a T5 with its vocabulary, or a preset's name."
        ) from error
    certificate_of_model(path)  # it is whole, or refused
    return workdir.model_fingerprint(located)


def certificate_of_model(model: str) -> dict[str, Any] | None:
    """Returns the certificate of a model's weights; `None` for public weights.

    `model` is a directory, a preset's name, or "" for random weights.
    """
    return read_certificate(checkpoints.locate(model)) if model else None


def require_public(
    init: str,
    parent: dict[str, Any] | None,
    consequence: str,
    remedy: str = "Start from public weights",
) -> None:
    """Refuses weights that derive from private queries, protected or not.

    `parent` is the certificate of the model `init`. `consequence` is the claim that
    would become untrue, and `remedy` a way out, for the error.
    """
    if parent is not None:
        raise validation.InputError(
            f"init is {init}, which was itself trained on private queries (epsilon "
            f"{parent['guarantee']['epsilon']}), as its certificate says: "
            f"{consequence}. {remedy}."
        )


def is_free(path: str) -> bool:
    """Returns whether a path is a synthetic or public set, not private pairs.

    Other programs write a `manifest.json`, too: that of a set has a schema. A damaged
    one counts as a set's, so that its reader says what is wrong with it; but not where
    a BEIR directory is at the top, which in a set is in a directory of its own.
    """
    manifest = pathlib.Path(path) / "manifest.json"
    if path == PYDOCS or not manifest.is_file():
        return False
    if (manifest.parent / CERTIFICATE).is_file():
        return True
    top = (manifest.parent / name for name in _TOP_OF_BEIR)
    if any(map(os.path.lexists, top)) and not (manifest.parent / "records").is_dir():
        return False
    try:
        values = validation.parse_json(manifest.read_text("utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(values, dict) and (not values or _SCHEMA in values)


def certificate_of_pairs(path: str) -> dict[str, Any] | None:
    """Returns the certificate of a set; `None` for public and for private pairs."""
    return read_certificate(path) if is_free(path) else None


def guarantee_of_pairs(path: str) -> str:
    """Returns the guarantee of unprotected results from pairs."""
    if not is_free(path):
        return releases.PRIVATE
    return releases.guarantee_of(read_certificate(path), path)


def load_source(path: str, split: str = "train", unit: str = "query") -> Source:
    """Finds the pairs of a BEIR split or of a synthetic set.

    `path` is "pydocs", a BEIR directory, or an output of `synthesize` or `prepare`,
    which has only the split "train". With unit "pair", private pairs have a row for
    every pair of the split; else one for every query, with its best document.

    Raises:
      DataError: malformed data, named by file and line.
      InputError: no pairs.
    """
    if is_free(path):
        # Checks that the set and its certificate belong together.
        count = read_manifest(path)["count"]
        certificate = read_certificate(path)
        source = Source(
            path, split, count, lambda: _pairs_of_set(path), False, certificate
        )
    else:
        beir = open_beir(path)
        pairs = beir.all_pairs(split) if unit == "pair" else beir.pairs(split)
        source = Source(path, split, len(pairs), lambda: iter(pairs), True, None, pairs)
    if not source.count:
        raise validation.InputError(
            f"{path} has no pairs in split {split!r}. Choose another split or set."
        )
    return source


def _pairs_of_set(path: str) -> Iterator[Pair]:
    for row in read_synthetic(path):
        yield Pair(row.query_id, row.query, row.document_id, row.document)


def sampled_documents(path: str, most: int | None) -> Iterator[Document]:
    """Yields the documents of a corpus in order, or an evenly spread part of them.

    The choice depends on the corpus alone, never on which documents have private
    queries: that would be a private read.

    `most` is their number; `None` takes all.
    """
    beir = open_beir(path)
    if most is None:
        yield from beir.documents()
        return
    validation.positive_integer("the number of documents", most)
    total = sum(1 for _ in beir.documents())
    yield from due_documents(beir.documents(), 0, total, most)


def due_documents(
    documents: Iterable[Document], start: int, total: int, most: int
) -> Iterator[Document]:
    """Yields those of consecutive documents at which the quota grows by one.

    The first n of the corpus's `total` documents give n · most // total; `start` of
    them are before these.
    """
    for number, document in enumerate(documents, start):
        if (number + 1) * most // total > number * most // total or most >= total:
            yield document
