"""The embedded corpus: what is read from sources, and that nothing leaks."""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tfdpsq.data import pydocs
from tfdpsq.data.pydocs import Docstring, build_pydocs, read_docstrings
from tfdpsq.validation import InputError

ROOT = Path(__file__).resolve().parents[2]
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
    assert list(read_docstrings(root)) == [
        Docstring("Says what the module is.", f"{BODY}\n\nA second paragraph."),
        Docstring("A class that counts.", BODY),
        Docstring("An inner function here.", f"\\alpha {BODY}"),
    ]


@pytest.mark.parametrize(
    "words, kept", [(2, False), (3, True), (25, True), (26, False)]
)
def test_queries_have_3_to_25_words(package, words, kept):
    root = package(a=f'"""{"w " * words}\n\n{BODY}"""')
    assert bool(list(read_docstrings(root))) == kept


@pytest.mark.parametrize("words, kept", [(14, False), (15, True)])
def test_documents_have_15_words_or_more(package, words, kept):
    root = package(a=f'"""One two three.\n\n{"w " * words}"""')
    assert bool(list(read_docstrings(root))) == kept


def test_tests_and_files_that_do_not_parse_are_left_out(package):
    source = f'"""In {{}} it stands.\n\n{BODY}"""'
    names = ["b", "sub__a", "tests__x", "test__y", "x_test", "test_x", "conftest"]
    root = package(**{name: source.format(name) for name in names}, broken='"""\n(')
    (root / "latin.py").write_bytes(b'"""\xe9 no coding line."""')
    assert [pair.summary for pair in read_docstrings(root)] == [
        "In b it stands.",
        "In sub__a it stands.",
    ]


def build_from(root, cache, monkeypatch):
    monkeypatch.setattr(pydocs, "_folder", lambda name: root)
    return build_pydocs(cache, ["python"])


def test_one_pair_a_summary_and_one_document_a_body(package, tmp_path, monkeypatch):
    root = package(
        a=f'"""Return the value.\n\n{BODY}"""',
        b=f'"""return  the VALUE\n\n{BODY} other"""',  # The summary of a.
        c=f'"""Another question here.\n\n{BODY.upper()}!"""',  # The body of a.
        d=f'"""{BODY}\n\nThis document has a query that is the whole of one. {BODY}"""',
    )
    beir = build_from(root, tmp_path / "cache", monkeypatch)
    pairs = [pair for split in beir.splits() for pair in beir.pairs(split)]
    assert {(pair.query, pair.document) for pair in pairs} == {
        ("Return the value.", BODY),
        ("Another question here.", BODY),
    }
    assert len(list(beir.documents())) == 1


def test_a_folder_without_docstrings_is_an_error(package, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"no docstring was found.*sources \(.py\)"):
        build_from(package(a="x = 1"), tmp_path / "cache", monkeypatch)
    assert os.listdir(tmp_path / "cache") == []


def test_a_cached_corpus_is_not_built_again(tmp_path, monkeypatch):
    first = build_pydocs(tmp_path, ["absl", "requests"])
    monkeypatch.setattr(pydocs, "read_docstrings", lambda folder: pytest.fail("built"))
    again = build_pydocs(tmp_path, ["requests", "absl"])
    assert again.path == first.path
    assert again.validate(["train"]).documents > 100


def test_another_version_of_a_package_is_another_corpus(tmp_path, monkeypatch):
    first = build_pydocs(tmp_path, ["absl"])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    other = build_pydocs(tmp_path, ["absl"])
    assert other.path != first.path
    provenance = json.loads((other.path / "provenance.json").read_text())
    assert provenance["versions"] == {"absl": "99"}


def test_the_cache_is_where_xdg_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build_pydocs(packages=["absl"]).path.parent == tmp_path / "xdg" / "tfdpsq"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # To be ignored, says XDG.
    monkeypatch.setenv("HOME", str(tmp_path))
    path = build_pydocs(packages=["absl"]).path
    assert path.parent == tmp_path / ".cache" / "tfdpsq"


def test_packages_are_parsed_never_imported(tmp_path):
    code = (
        "import sys; from tfdpsq.data.pydocs import build_pydocs\n"
        f"build_pydocs({str(tmp_path)!r}, ['mpmath', 'oauthlib'])\n"
        "assert not {'mpmath', 'oauthlib'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_missing_and_unknown_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="package is 'torch'; choose among python"):
        build_pydocs(tmp_path, ["torch"])

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(InputError, match="pip install absl-py scikit-learn"):
        build_pydocs(tmp_path, ["absl", "sklearn"])


@pytest.fixture(scope="module")
def corpus():
    """The full corpus: from the user's cache where it is there, else built."""
    return build_pydocs()


def test_the_full_corpus_is_what_the_readme_says(corpus):
    counts = corpus.validate(["train", "dev", "test"])
    total = sum(counts.pairs.values())
    assert total == counts.queries > 20_000
    assert total >= counts.documents > 0.9 * total
    # 10 %: the deviation of a binomial share is 0.2 % at this n; five of them.
    for split in ("dev", "test"):
        assert abs(counts.pairs[split] / total - 0.1) < 0.0105
    provenance = json.loads((corpus.path / "provenance.json").read_text())
    assert provenance["counts"] == dataclasses.asdict(counts)
    assert provenance["fingerprint"] == corpus.fingerprint()


def test_nothing_of_one_split_is_relevant_in_another(corpus):
    where_document, where_query = {}, {}
    for split in corpus.splits():
        for pair in corpus.pairs(split):
            key = pydocs._letters_and_digits(pair.document)
            assert where_document.setdefault(key, split) == split
            key = pydocs._letters_and_digits(pair.query)
            assert where_query.setdefault(key, split) == split
    assert not where_query.keys() & where_document.keys()


def test_queries_are_short_and_documents_are_long(corpus):
    texts = corpus.queries()
    sizes = Counter(len(text.split()) for text in texts.values())
    assert min(sizes) == 3 and max(sizes) == 25
    for document in corpus.documents():
        assert document.title == ""  # A qualified name would give the answer away.
        assert len(document.text.split()) >= 15
