"""The embedded corpus: 20,000+ real English pairs that need no download.

The docstrings of the standard library and of the packages that tfdpsq requires:
the summary sentence is the query (it plays the private part), the rest is the
document (public). No query stands as a sentence of its own in a document or in the
rest of the public text: where one recurs it is taken out. Sources are parsed, never
imported.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from absl import logging
from tqdm import tqdm

from tfdpsq.data.beir import BeirDirectory
from tfdpsq.data.beir_lines import read_documents
from tfdpsq.data.beir_writer import write_beir_files
from tfdpsq.data.docstrings import Docstring, docstrings_of
from tfdpsq.data.files import atomic_directory, write_json
from tfdpsq.data.recurrence import Sentences, refuse_recurring
from tfdpsq.data.texts import Document
from tfdpsq.validation import InputError

STANDARD_LIBRARY = "python"

# Import name -> distribution. Fixed, so that the corpus is the same whichever
# extras are installed: only what a plain install always brings, and no namespace
# package (such as `google`) into which other distributions may put files.
PACKAGES: Mapping[str, str] = {
    STANDARD_LIBRARY: STANDARD_LIBRARY,
    "absl": "absl-py",
    "attr": "attrs",
    "dp_accounting": "dp-accounting",
    "etils": "etils",
    "grpc": "grpcio",
    "h5py": "h5py",
    "joblib": "joblib",
    "keras": "keras",
    "keras_core": "keras-core",
    "keras_nlp": "keras-nlp",
    "markdown": "Markdown",
    "markdown_it": "markdown-it-py",
    "matplotlib": "matplotlib",
    "ml_collections": "ml_collections",
    "mpmath": "mpmath",
    "numpy": "numpy",
    "oauthlib": "oauthlib",
    "opt_einsum": "opt_einsum",
    "portalocker": "portalocker",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
    "pygments": "Pygments",
    "requests": "requests",
    "rich": "rich",
    "sacrebleu": "sacrebleu",
    "scann": "scann",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "tensorflow": "tensorflow",
    "tensorflow_datasets": "tensorflow-datasets",
    "tensorflow_estimator": "tensorflow-estimator",
    "tensorflow_hub": "tensorflow-hub",
    "tensorflow_privacy": "tensorflow-privacy",
    "tensorflow_probability": "tensorflow-probability",
    "tensorflow_recommenders": "tensorflow-recommenders",
    "tensorflow_text": "tensorflow-text",
    "tqdm": "tqdm",
    "urllib3": "urllib3",
    "werkzeug": "Werkzeug",
}

PUBLIC_TEXT = "public.jsonl"

# The modules next to this one that decide what a corpus holds, to the byte.
_DECIDING = ("beir_writer", "docstrings", "pydocs", "recurrence")


def build_pydocs(
    cache_dir: str | os.PathLike | None = None,
    packages: Iterable[str] = tuple(PACKAGES),
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
    code = {
        name: hashlib.sha256(
            Path(__file__).with_name(f"{name}.py").read_bytes()
        ).hexdigest()
        for name in _DECIDING
    }
    key = {"code": code, "versions": versions}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    target = _cache(cache_dir) / f"pydocs-{digest[:16]}"
    if target.is_dir() and any(target.iterdir()):
        return BeirDirectory(target)
    start = time.monotonic()
    with _collector_paused():
        docstrings = [
            docstring
            for package in tqdm(packages, desc="pydocs", unit="package", leave=False)
            for docstring in docstrings_of(_folder(package))
        ]
        pairs, others = _public_and_private(docstrings)
    try:
        with atomic_directory(target) as partial:
            _write(partial, pairs, others, versions)
    except InputError:
        # Another process may have finished the same corpus first.
        if not (target / "provenance.json").is_file():
            raise
    logging.info(
        "pydocs: %d pairs in %.1f s: %s", len(pairs), time.monotonic() - start, target
    )
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
    if path.is_file():
        yield from read_documents(path, may_be_empty=True)


def refuse_queries(path: str | os.PathLike, benchmark: BeirDirectory) -> None:
    """Refuses a file of public text that holds a query of the benchmark.

    Args:
      path: JSON Lines with "text" (and "title").
      benchmark: what `build_pydocs` returned. For data of your own such a check
        would be a private read.

    Raises:
      DataError: names the file, the line and the query.
    """
    refuse_recurring(path, Sentences(benchmark.queries().values()))


def split_of(document_id: str) -> str:
    """Returns the split of a document: 10 % test, 10 % dev, 80 % train."""
    place = int(hashlib.sha1(document_id.encode()).hexdigest()[:8], 16) % 100
    return "test" if place < 10 else "dev" if place < 20 else "train"


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Syntax trees hold no cycles, and looking for them takes much of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
    write_beir_files(directory, documents.values(), queries, qrels)
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
        try:
            found[package] = (
                platform.python_version()
                if package == STANDARD_LIBRARY
                else importlib.metadata.version(PACKAGES[package])
            )
        except importlib.metadata.PackageNotFoundError:
            missing.append(PACKAGES[package])
    if missing:
        raise InputError(
            "pydocs reads the docstrings of the packages that tfdpsq requires, but "
            f"{', '.join(missing)} not installed. Run: pip install "
            f"{' '.join(missing)}"
        )
    return found


def _folder(package: str) -> Path:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)  # Finds a top package, imports nothing.
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"{PACKAGES[package]} is installed, but its package {package} is not "
            "found. Reinstall it: pip install --force-reinstall "
            f"{PACKAGES[package]}"
        )
    return Path(next(iter(spec.submodule_search_locations)))
