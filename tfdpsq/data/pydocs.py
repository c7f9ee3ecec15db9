"""The embedded corpus: 20,000+ real English pairs that need no download.

The docstrings of the standard library and of the packages that tfdpsq requires:
the summary sentence is the query (it plays the private part), the rest is the
document (public). No query stands as a sentence of its own in a document or in the
rest of the public text: where one recurs it is taken out. Sources are parsed, never
imported.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from absl import logging
from tqdm import tqdm

from tfdpsq.data.beir import BeirDirectory, BeirWriter, read_documents
from tfdpsq.data.docstrings import Docstring, docstrings_of
from tfdpsq.data.io import atomic_directory, write_json
from tfdpsq.data.recurrence import Sentences, refuse_recurring
from tfdpsq.data.texts import Document
from tfdpsq.validation import InputError

STANDARD_LIBRARY = "python"

# Import names. Fixed, so that the corpus is the same whichever extras are installed:
# only what a plain install always brings, and no namespace package (such as `google`)
# into which other distributions may put files.
PACKAGES = (
    STANDARD_LIBRARY,
    *"absl attr dp_accounting etils grpc h5py joblib keras keras_core".split(),
    *"keras_nlp markdown markdown_it matplotlib ml_collections mpmath".split(),
    *"numpy oauthlib opt_einsum portalocker psutil pyarrow pygments".split(),
    *"requests rich sacrebleu scann scipy sklearn tensorboard tensorflow".split(),
    *"tensorflow_datasets tensorflow_estimator tensorflow_hub".split(),
    *"tensorflow_privacy tensorflow_probability tensorflow_recommenders".split(),
    *"tensorflow_text tqdm urllib3 werkzeug".split(),
)
# Of those whose distribution has another name.
_DISTRIBUTIONS = {
    "absl": "absl-py",
    "attr": "attrs",
    "grpc": "grpcio",
    "markdown_it": "markdown-it-py",
    "sklearn": "scikit-learn",
}

PUBLIC_TEXT = "public.jsonl"

# Of the code that decides what a corpus holds, to the byte.
_VERSION = 2


def load(path: str | os.PathLike = "pydocs") -> BeirDirectory:
    """Opens a BEIR directory, or the embedded corpus for "pydocs"."""
    return build_pydocs() if path == "pydocs" else BeirDirectory(path)


def build_pydocs(
    cache_dir: str | os.PathLike | None = None,
    packages: Iterable[str] = PACKAGES,
) -> BeirDirectory:
    """Returns the corpus as a BEIR directory, building it if the cache lacks it.

    One pair for each distinct summary, the first in order of package and module
    path; bodies with the same letters and digits are one document. Bodies that make
    no pair are in ``public.jsonl`` (see `public_documents`): further public text.
    Summaries that make none are left out altogether, since they are of the kind that
    is private here. Splits train, dev and test follow the hash of the document id,
    so that neither a document nor a query is relevant in two of them. The same
    versions of Python and the packages give the same bytes. ``provenance.json`` is
    next to the corpus.

    Args:
      cache_dir: where corpora are kept; default ``$XDG_CACHE_HOME/tfdpsq``, else
        ``~/.cache/tfdpsq``. An entry is keyed by all versions that matter.
      packages: import names out of `PACKAGES` (a smaller corpus for tests).

    Raises:
      InputError: a package is unknown or not installed, or the cache cannot be
        written.
    """
    packages = tuple(sorted(set(packages)))
    versions = _versions(packages)
    key = {"version": _VERSION, "versions": versions}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    target = _cache(cache_dir) / f"pydocs-{digest[:16]}"
    if target.is_dir() and any(target.iterdir()):
        return BeirDirectory(target)
    enabled = gc.isenabled()
    gc.disable()  # Syntax trees hold no cycles, and looking for them takes long.
    try:
        docstrings = [
            docstring
            for package in tqdm(packages, desc="pydocs", unit="package", leave=False)
            for docstring in docstrings_of(_folder(package))
        ]
        pairs, others = _public_and_private(docstrings)
    finally:
        if enabled:
            gc.enable()
    try:
        with atomic_directory(target) as partial:
            _write(partial, pairs, others, versions)
    except InputError:
        # Another process may have finished the same corpus first.
        if not (target / "provenance.json").is_file():
            raise
    logging.info("pydocs: %d pairs in %s", len(pairs), target)
    return BeirDirectory(target)


def public_documents(directory: BeirDirectory) -> Iterator[Document]:
    """Yields all public text of a corpus: its documents, and then ``public.jsonl``.

    Args:
      directory: what `build_pydocs` returned, or any other BEIR directory, which
        has its documents alone unless such a file is put next to them.

    Raises:
      DataError: malformed lines; names file and line.
    """
    yield from directory.documents()
    path = directory.path / PUBLIC_TEXT
    if path.is_file() and path.stat().st_size:
        yield from read_documents(path, may_be_empty=True)


def split_of(document_id: str) -> str:
    """Returns the split of a document: 10 % test, 10 % dev, 80 % train."""
    place = int(hashlib.sha1(document_id.encode()).hexdigest()[:8], 16) % 100
    return "test" if place < 10 else "dev" if place < 20 else "train"


def _public_and_private(
    docstrings: Iterable[Docstring],
) -> tuple[list[Docstring], list[str]]:
    """The pairs, and the bodies that make none; no query recurs in any body."""
    docstrings = list(docstrings)
    # A query that is some document, word for word, would be a gift to retrieval.
    whole = {_letters_and_digits(d.body) for d in docstrings if d.is_document}
    asked = {
        found.summary
        for found in docstrings
        if found.is_pair and _letters_and_digits(found.summary) not in whole
    }
    # Those too that will make no pair, as their body is too short then: the set
    # must not depend on what is removed because of it.
    queries = Sentences(asked)
    bodies = {
        body: queries.without(body).strip()
        for body in {found.body for found in docstrings}
    }
    cleaned = [Docstring(found.summary, bodies[found.body]) for found in docstrings]
    pairs = _distinct(d for d in cleaned if d.is_pair and d.summary in asked)
    seen = {_letters_and_digits(pair.body) for pair in pairs}
    others = []
    for found in cleaned:
        key = _letters_and_digits(found.body)
        if found.is_document and key not in seen:
            seen.add(key)
            others.append(found.body)
    return pairs, others


def _distinct(docstrings: Iterable[Docstring]) -> list[Docstring]:
    """Keeps one pair a summary and one text a body, whatever their punctuation."""
    queries: dict[str, Docstring] = {}
    bodies: dict[str, str] = {}
    for pair in docstrings:
        key = _letters_and_digits(pair.summary)
        if key and key not in queries:
            body = bodies.setdefault(_letters_and_digits(pair.body), pair.body)
            queries[key] = Docstring(pair.summary, body)
    # Some documents have lost a sentence by now, and may be some query only so.
    return [pair for key, pair in queries.items() if key not in bodies]


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


def _identifier(text: str) -> str:
    return hashlib.sha1(_letters_and_digits(text).encode()).hexdigest()[:16]


def _write(
    directory: Path, pairs: list[Docstring], others: list[str], versions: dict
) -> None:
    documents: dict[str, Document] = {}
    queries: list[tuple[str, str]] = []
    qrels: dict[str, list] = {"train": [], "dev": [], "test": []}
    for pair in pairs:
        document_id = f"pydocs-{_identifier(pair.body)}"
        query_id = f"q-pydocs-{_identifier(pair.summary)}"
        documents.setdefault(document_id, Document(document_id, "", pair.body))
        queries.append((query_id, pair.summary))
        qrels[split_of(document_id)].append((query_id, document_id, 1))
    if not pairs:
        raise InputError(
            f"no docstring was found in {', '.join(versions)}; are the sources (.py) "
            "installed? Install Python and the packages with them."
        )
    # A split that stays empty (a tiny corpus) has no file, and readers say so.
    with BeirWriter(directory) as writer:
        for document in documents.values():
            writer.add_document(document)
        for query in queries:
            writer.add_query(*query)
        for split, rows in qrels.items():
            for row in rows:
                writer.add_judgement(split, *row)
    with open(directory / PUBLIC_TEXT, "w", encoding="utf-8") as file:
        for text in others:
            record = {"_id": f"pydocs-{_identifier(text)}", "text": text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    sentences = Sentences(text for _, text in queries)
    for name in ("corpus.jsonl", PUBLIC_TEXT):
        refuse_recurring(directory / name, sentences)
    provenance = {
        "source": "docstrings: summary -> rest",
        "versions": versions,
        "counts": {
            "documents": len(documents),
            "queries": len(queries),
            "pairs": {split: len(rows) for split, rows in qrels.items()},
        },
        "further_public_texts": len(others),
        "fingerprint": BeirDirectory(directory).fingerprint(),
    }
    write_json(directory / "provenance.json", provenance)


def _cache(cache_dir: str | os.PathLike | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    # The XDG rules: an unset, empty or relative value means the default.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tfdpsq"


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found, missing = {}, []
    for package in packages:
        if package not in PACKAGES:
            raise InputError(
                f"package is {package!r}; choose among {', '.join(PACKAGES)}."
            )
        distribution = _DISTRIBUTIONS.get(package, package)
        try:
            found[package] = (
                platform.python_version()
                if package == STANDARD_LIBRARY
                else importlib.metadata.version(distribution)
            )
        except importlib.metadata.PackageNotFoundError:
            missing.append(distribution)
    if missing:
        raise InputError(
            f"pydocs reads docstrings of {', '.join(missing)}, not installed. Run: pip "
            f"install {' '.join(missing)}"
        )
    return found


def _folder(package: str) -> Path:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)  # Finds a top package, imports nothing.
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the package {package} is not found. Reinstall it.")
    return Path(next(iter(spec.submodule_search_locations)))
