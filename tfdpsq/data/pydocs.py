"""The embedded corpus: 20,000+ real English pairs that need no download.

The docstrings of the standard library and of the packages that tfdpsq requires:
the summary sentence is the query (it plays the private part), the rest is the
document (public). Sources are parsed, never imported.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
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
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from absl import logging
from tqdm import tqdm

from tfdpsq.data.beir import BeirDirectory
from tfdpsq.data.beir_writer import write_beir_files
from tfdpsq.data.files import atomic_directory, atomic_write
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

_QUERY_WORDS = range(3, 26)
_LEAST_DOCUMENT_WORDS = 15

# Tests, caches, other people's packages, and machine-made copies of a package's
# own sources (tensorflow_probability/substrates).
_SKIPPED_FOLDERS = {
    "__pycache__",
    "_test_data",
    "dist-packages",
    "idle_test",
    "site-packages",
    "substrates",
    "test",
    "tests",
}
_TEST_FILE = re.compile(r"(^test_.*|.*_tests?|^conftest)\.py$")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A docstring split at its first blank line.

    Attributes:
      summary: what comes before, white space collapsed; 3 to 25 words.
      body: what comes after, line breaks kept; at least 15 words.
    """

    summary: str
    body: str


def build_pydocs(
    cache_dir: str | os.PathLike | None = None,
    packages: Iterable[str] = tuple(PACKAGES),
) -> BeirDirectory:
    """Returns the corpus as a BEIR directory, building it if the cache lacks it.

    One pair for each distinct summary, the first in order of package and module
    path; bodies with the same letters and digits are one document. Splits train,
    dev and test follow the hash of the document id, so that neither a document
    nor a query is relevant in two of them. The same versions of Python and the
    packages give the same bytes. ``provenance.json`` lies beside the corpus.

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
    key = {
        "code": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": versions,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    target = _cache(cache_dir) / f"pydocs-{digest[:16]}"
    if target.is_dir() and any(target.iterdir()):
        return BeirDirectory(target)
    start = time.monotonic()
    with _collector_paused():
        pairs = _distinct(
            pair
            for package in tqdm(packages, desc="pydocs", unit="package", leave=False)
            for pair in read_docstrings(_folder(package))
        )
    try:
        with atomic_directory(target) as partial:
            _write(partial, pairs, versions)
    except InputError:
        # Another process may have finished the same corpus first.
        if not (target / "provenance.json").is_file():
            raise
    logging.info(
        "pydocs: %d pairs in %.1f s: %s", len(pairs), time.monotonic() - start, target
    )
    return BeirDirectory(target)


def read_docstrings(folder: str | os.PathLike) -> Iterator[Docstring]:
    """Yields the usable docstrings of all modules under a folder.

    Modules come in the order of their paths, docstrings in the order of their
    lines. Test folders and files are left out, as are files that do not parse.

    Args:
      folder: a package's directory.
    """
    root = Path(folder)
    paths = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        paths += [
            Path(parent, name)
            for name in names
            if name.endswith(".py") and not _TEST_FILE.match(name)
        ]
    for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
        yield from _module_docstrings(path.read_bytes())


def split_of(document_id: str) -> str:
    """Returns the split of a document: 10 % test, 10 % dev, 80 % train."""
    place = int(hashlib.sha1(document_id.encode()).hexdigest()[:8], 16) % 100
    return "test" if place < 10 else "dev" if place < 20 else "train"


def _module_docstrings(source: bytes) -> Iterator[Docstring]:
    # Parsing is nearly all of the cost, and a file without these has nothing.
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes in old sources.
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # Python 2 left-overs, templates.
    for node in _owners(tree):
        found = _split(ast.get_docstring(node) or "")
        if found:
            yield found


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


def _owners(
    node: ast.AST,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields what can have a docstring, in order; far fewer nodes than ast.walk."""
    if isinstance(
        node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    ):
        yield node
    for block in ("body", "handlers", "orelse", "finalbody"):
        children = getattr(node, block, ())
        if isinstance(children, list):  # The body of a lambda is an expression.
            for child in children:
                yield from _owners(child)


def _split(docstring: str) -> Docstring | None:
    parts = _BLANK_LINE.split(docstring, maxsplit=1)
    if len(parts) < 2:
        return None
    try:
        docstring.encode("utf-8")
    except UnicodeEncodeError:
        return None  # An escaped lone surrogate: no text.
    summary = parts[0].split()
    body = "\n".join(line.rstrip() for line in parts[1].splitlines()).strip()
    if len(summary) not in _QUERY_WORDS or len(body.split()) < _LEAST_DOCUMENT_WORDS:
        return None
    return Docstring(" ".join(summary), body)


def _distinct(docstrings: Iterable[Docstring]) -> list[Docstring]:
    """Keeps one pair a summary and one text a body, whatever their punctuation."""
    queries: dict[str, Docstring] = {}
    bodies: dict[str, str] = {}
    for pair in docstrings:
        key = _letters_and_digits(pair.summary)
        if key and key not in queries:
            body = bodies.setdefault(_letters_and_digits(pair.body), pair.body)
            queries[key] = Docstring(pair.summary, body)
    # A query that is some document, word for word, would be a gift to retrieval.
    return [pair for key, pair in queries.items() if key not in bodies]


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.casefold())


def _identifier(text: str) -> str:
    return hashlib.sha1(_letters_and_digits(text).encode()).hexdigest()[:16]


def _write(directory: Path, pairs: list[Docstring], versions: dict) -> None:
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
    provenance = {
        "source": "docstrings: summary -> rest",
        "versions": versions,
        "counts": {
            "documents": len(documents),
            "queries": len(queries),
            "pairs": {split: len(rows) for split, rows in qrels.items()},
        },
        "fingerprint": BeirDirectory(directory).fingerprint(),
    }
    atomic_write(
        directory / "provenance.json",
        json.dumps(provenance, indent=2, sort_keys=True) + "\n",
    )


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
