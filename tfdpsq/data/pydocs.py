"""The embedded corpus: 20,000+ real English pairs that need no download.

The docstrings of the standard library and of the packages that tfdpsq requires:
the summary sentence is the query (it plays the private part), the rest is the
document (public). No query stands as a sentence of its own in a document or in the
rest of the public text: where one recurs it is taken out. Sources are parsed, never
imported.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from absl import logging
from tqdm import tqdm

from tfdpsq.data.beir import BeirDirectory, BeirWriter, locate_documents
from tfdpsq.data.io import atomic_directory, write_json
from tfdpsq.data.texts import Document
from tfdpsq.validation import InputError, one_of

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
_VERSION = 3

_QUERY_WORDS = range(3, 26)
_LEAST_DOCUMENT_WORDS = 15
# Tests, caches, other people's packages, and machine-made copies of a package's
# own sources (tensorflow_probability/substrates).
_SKIPPED_FOLDERS = {
    *"__pycache__ _test_data dist-packages idle_test site-packages".split(),
    *"substrates test tests".split(),
}
_TEST_FILE = re.compile(r"(^test_.*|.*_tests?|^conftest)\.py$")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A docstring split at its first blank line."""

    summary: str  # what comes before, white space collapsed
    body: str  # what comes after, line breaks kept

    @property
    def is_document(self) -> bool:
        """Returns whether the body is long enough to be a document: 15 words."""
        return len(self.body.split()) >= _LEAST_DOCUMENT_WORDS

    @property
    def is_pair(self) -> bool:
        """Returns whether it is a pair: the summary, its query, has 3 to 25 words."""
        return len(self.summary.split()) in _QUERY_WORDS and self.is_document


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
      cache_dir: where corpora are kept, by the versions that matter; by default
        ``$XDG_CACHE_HOME/tfdpsq``, else ``~/.cache/tfdpsq``.
      packages: import names out of `PACKAGES` (a smaller corpus for tests).

    Raises InputError if a package is not installed, or the cache cannot be written.
    """
    packages = tuple(sorted(set(packages)))
    versions = {package: _version(package) for package in packages}
    key = {"version": _VERSION, "versions": versions}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tfdpsq")
    target = Path(cache_dir or cache) / f"pydocs-{digest[:16]}"
    if target.is_dir() and any(target.iterdir()):
        return BeirDirectory(target)
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
    logging.info("pydocs: %d pairs in %s", len(pairs), target)
    return BeirDirectory(target)


def public_documents(directory: BeirDirectory) -> Iterator[Document]:
    """Yields all public text of a corpus: its documents, and then ``public.jsonl``.

    Other BEIR directories have such a file only if it is put next to their documents.
    """
    yield from directory.documents()
    path = directory.path / PUBLIC_TEXT
    if path.is_file() and path.stat().st_size:
        yield from (document for *_, document in locate_documents(path))


def docstrings_of(folder: str | os.PathLike) -> Iterator[Docstring]:
    """Yields the docstrings with a blank line of all modules under a folder, in order.

    Test folders and files are left out, as are files that do not parse.
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
        source = path.read_bytes()
        # Parsing is nearly all of the cost, and a file without these has nothing.
        if b'"""' not in source and b"'''" not in source:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Invalid escapes in old sources.
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue  # Python 2 left-overs, templates.
        for node in _owners(tree):
            summary, *rest = _BLANK_LINE.split(ast.get_docstring(node) or "", 1)
            # An escaped lone surrogate is not text.
            if rest and not re.search("[\ud800-\udfff]", summary + rest[0]):
                body = "\n".join(line.rstrip() for line in rest[0].splitlines())
                yield Docstring(" ".join(summary.split()), body.strip())


def _owners(
    node: ast.AST,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields what can have a docstring, in order; far fewer nodes than ast.walk."""
    if isinstance(node, _OWNERS):
        yield node
    for block in ("body", "handlers", "orelse", "finalbody"):
        children = getattr(node, block, ())
        if isinstance(children, list):  # The body of a lambda is an expression.
            for child in children:
                yield from _owners(child)


def _split_of(document_id: str) -> str:
    """Returns the split of a document: 10 % test, 10 % dev, 80 % train."""
    place = int(hashlib.sha1(document_id.encode()).hexdigest()[:8], 16) % 100
    return "test" if place < 10 else "dev" if place < 20 else "train"


def _public_and_private(
    docstrings: list[Docstring],
) -> tuple[list[Docstring], list[str]]:
    """The pairs, and the bodies that make none; no query recurs in any body."""
    from tfdpsq.data.recurrence import Sentences  # and TensorFlow with it

    # A query that is some document, word for word, would be a gift to retrieval.
    whole = {_letters_and_digits(d.body) for d in docstrings if d.is_document}
    asked = {
        found.summary
        for found in docstrings
        if found.is_pair and _letters_and_digits(found.summary) not in whole
    }
    # Those too that will make no pair, as their body is too short then: the set
    # must not depend on what is removed because of it.
    bodies = list(dict.fromkeys(found.body for found in docstrings))
    left = dict(zip(bodies, map(str.strip, Sentences(asked).without(bodies))))
    cleaned = [Docstring(found.summary, left[found.body]) for found in docstrings]
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
    return "pydocs-" + hashlib.sha1(_letters_and_digits(text).encode()).hexdigest()[:16]


def _write(
    directory: Path, pairs: list[Docstring], others: list[str], versions: dict
) -> None:
    if not pairs:
        raise InputError(
            f"no docstring was found in {', '.join(versions)}; are the sources (.py) "
            "installed? Install Python and the packages with them."
        )
    counts = dict.fromkeys(("train", "dev", "test"), 0)
    documents = {_identifier(pair.body): pair.body for pair in pairs}
    with BeirWriter(directory) as writer:
        for name, body in documents.items():
            writer.add_document(Document(name, "", body))
        for pair in pairs:
            document_id, query_id = map(_identifier, (pair.body, pair.summary))
            writer.add_query(f"q-{query_id}", pair.summary)
            split = _split_of(document_id)
            writer.add_judgement(split, f"q-{query_id}", document_id, 1)
            counts[split] += 1
    with open(directory / PUBLIC_TEXT, "w", encoding="utf-8") as file:
        for text in others:
            record = {"_id": _identifier(text), "text": text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    provenance = {
        "source": "docstrings: summary -> rest",
        "versions": versions,
        "counts": {"documents": len(documents), "queries": len(pairs), "pairs": counts},
        "further_public_texts": len(others),
        "fingerprint": BeirDirectory(directory).fingerprint(),
    }
    write_json(directory / "provenance.json", provenance)


def _version(package: str) -> str:
    if package == STANDARD_LIBRARY:
        return platform.python_version()
    name = _DISTRIBUTIONS.get(one_of("package", package, PACKAGES), package)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"pydocs reads docstrings of {name}. Run: pip install {name}"
        ) from None


def _folder(package: str) -> Path:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)  # Finds a top package, imports nothing.
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the package {package} is not found. Reinstall it.")
    return Path(spec.submodule_search_locations[0])
