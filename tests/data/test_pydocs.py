"""The embedded corpus: what is read from sources, and that nothing leaks."""

import dataclasses
import importlib.metadata
import json
import os
import re
import textwrap

import pytest

from tfdpsq.data import pydocs
from tfdpsq.data.pydocs import (
    Docstring,
    build_pydocs,
    docstrings_of,
    public_documents,
)
from tfdpsq.validation import DataError, InputError

BODY = "one two three four five six seven eight nine ten a b c d e"


@pytest.fixture
def package(tmp_path):
    """Writes modules into a package folder; returns the function that does."""
    root = tmp_path / "package"

    def write(**modules):
        for name, source in modules.items():
            path = root / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        return root

    return write


def _pairs_of(folder):
    return [found for found in docstrings_of(folder) if found.is_pair]


def test_docstrings_are_split_at_the_first_blank_line(package):
    root = package(
        a=f'''
        """Says what the
        module is.

        {BODY}

        A second paragraph."""
        class C:
            \'\'\'A class that counts.
            \t
            {BODY}\'\'\'
            async def f(self):
                if True:
                    def g():
                        r"""An inner function here.

                        \\alpha {BODY}"""
        '''
    )
    assert _pairs_of(root) == [
        Docstring("Says what the module is.", f"{BODY}\n\nA second paragraph."),
        Docstring("A class that counts.", BODY),
        Docstring("An inner function here.", f"\\alpha {BODY}"),
    ]


def test_tests_and_files_that_do_not_parse_are_left_out(package):
    source = f'"""In {{}} it stands.\n\n{BODY}"""'
    names = ["b", "sub__a", "tests__x", "test__y", "x_test", "test_x", "conftest"]
    root = package(**{name: source.format(name) for name in names}, broken='"""\n(')
    (root / "latin.py").write_bytes(b'"""\xe9 no coding line."""')
    assert [pair.summary for pair in _pairs_of(root)] == [
        "In b it stands.",
        "In sub__a it stands.",
    ]


@pytest.fixture
def build(package, tmp_path, monkeypatch):
    """Returns a function that builds a corpus of modules."""

    def run(**modules):
        root = package(**modules)
        monkeypatch.setattr(pydocs, "_folder", lambda name: root)
        return build_pydocs(tmp_path / "cache", ["python"])

    return run


def test_one_pair_per_summary_and_one_document_per_body(build):
    beir = build(
        a=f'"""Return the value.\n\n{BODY}"""',
        b=f'"""return  the VALUE\n\n{BODY} other"""',  # The summary of a.
        c=f'"""Another question here.\n\n{BODY.upper()}!"""',  # The body of a.
        d=f'"""{BODY}\n\nThis document has a query that is the whole of one. {BODY}"""',
    )
    pairs = [pair for split in beir.splits() for pair in beir.pairs(split)]
    assert {(pair.query, pair.document) for pair in pairs} == {
        ("Return the value.", BODY),
        ("Another question here.", BODY),
    }
    assert len(list(beir.documents())) == 1


def test_no_query_is_in_public_text(build):
    beir = build(
        a=f'"""Return the value.\n\nIt is short.\n    Return the\n    value\n{BODY}"""',
        # Of no use as a pair without the query: 14 words.
        b=f'"""Sort the list.\n\n{BODY[:-2]}. Return the value."""',
        # No pair from the start, so that its body is public and its summary nowhere.
        c=f'"""Quite secret.\n\n{BODY} x. RETURN the value. Sort the list, or not."""',
        # The same letters and digits as what c leaves, once again.
        d=f'"""Another.\n\n{BODY}; x. Sort the list or not"""',
        # A query in its own document, and what would be one if b were none.
        e=f'"""Set it up.\n\nSet it up. {BODY} y. sort the list"""',
    )
    assert set(beir.queries().values()) == {"Return the value.", "Set it up."}
    found = list(public_documents(beir))
    assert [" ".join(document.text.split()) for document in found] == [
        f"It is short. {BODY}",
        f"{BODY} y.",
        f"{BODY} x. Sort the list, or not.",
    ]
    own = list(beir.documents())
    assert found[: len(own)] == own and found[2].id not in {d.id for d in own}
    (beir.path / pydocs.PUBLIC_TEXT).write_text('{"_id": "y", "text": 3}\n')
    with pytest.raises(DataError, match="public.jsonl:1: .*text"):
        list(public_documents(beir))


def test_missing_packages_and_docstrings_are_named(build, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no docstring was found"):
        build(a="x = 1")
    assert os.listdir(tmp_path / "cache") == []
    with pytest.raises(InputError, match="package is 'torch'"):
        build_pydocs(tmp_path, ["torch"])

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(InputError, match="pip install absl-py"):
        build_pydocs(tmp_path, ["absl", "sklearn"])


def test_cache_is_reused_until_a_package_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = build_pydocs(packages=["absl", "requests"])
    assert first.path.parent == tmp_path / "tfdpsq"
    made = first.corpus_file.stat().st_mtime_ns
    again = build_pydocs(packages=["requests", "absl"])
    assert again.path == first.path and again.corpus_file.stat().st_mtime_ns == made
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    other = build_pydocs(packages=["absl", "requests"])
    assert other.path != first.path
    provenance = json.loads((other.path / "provenance.json").read_text())
    assert provenance["versions"] == {"absl": "99", "requests": "99"}


@pytest.fixture(
    params=["part", pytest.param("whole", marks=pytest.mark.slow)], scope="module"
)
def corpus(request, tmp_path_factory):
    """Returns (corpus, the least number of its pairs); the whole one from the cache."""
    if request.param == "whole":
        return build_pydocs(), 20_000
    packages = ["absl", "requests", "sklearn", "urllib3"]
    return build_pydocs(tmp_path_factory.mktemp("cache"), packages), 1_000


def test_corpus_has_disjoint_splits_of_the_stated_shares(corpus):
    beir, least = corpus
    counts = beir.validate(["train", "dev", "test"])
    total = sum(counts.pairs.values())
    assert total == counts.queries > least
    assert total >= counts.documents > 0.9 * total
    # 10 %: five deviations of a binomial share.
    for split in ("dev", "test"):
        assert abs(counts.pairs[split] / total - 0.1) < 5 * (0.09 / total) ** 0.5
    where_document, where_query = {}, {}

    def key(text):
        return re.sub(r"[\W_]", "", text.casefold())

    for split in beir.splits():
        for pair in beir.pairs(split):
            assert where_document.setdefault(key(pair.document), split) == split
            assert where_query.setdefault(key(pair.query), split) == split
            assert 3 <= len(pair.query.split()) <= 25
    assert not where_query.keys() & where_document.keys()
    for document in beir.documents():
        assert document.title == ""  # A qualified name would give the answer away.
        assert len(document.text.split()) >= 15
    provenance = json.loads((beir.path / "provenance.json").read_text())
    assert provenance["counts"].items() <= dataclasses.asdict(counts).items()
    assert provenance["fingerprint"] == beir.fingerprint()
