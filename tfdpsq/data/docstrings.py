"""Docstrings of a package's sources, which are parsed, never imported."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

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
      summary: what comes before, white space collapsed.
      body: what comes after, line breaks kept.
    """

    summary: str
    body: str

    @property
    def is_document(self) -> bool:
        """Returns whether the body is long enough to be a document: 15 words."""
        return len(self.body.split()) >= _LEAST_DOCUMENT_WORDS

    @property
    def is_pair(self) -> bool:
        """Returns whether it is a pair: the summary, its query, has 3 to 25 words."""
        return len(self.summary.split()) in _QUERY_WORDS and self.is_document


def docstrings_of(folder: str | os.PathLike) -> Iterator[Docstring]:
    """Yields the docstrings with a blank line of all modules under a folder.

    Modules come in the order of their paths, docstrings in the order of their lines.
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
        yield from _module_docstrings(path.read_bytes())


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
    body = "\n".join(line.rstrip() for line in parts[1].splitlines()).strip()
    return Docstring(" ".join(parts[0].split()), body)
