"""The embedded corpus: what is read from sources, and that nothing leaks."""

import ast
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from configs.paper import tables as paper
from tfdpsq.data import pydocs
from tfdpsq.data.docstrings import Docstring, docstrings_of
from tfdpsq.data.pydocs import (
    PACKAGES,
    build_pydocs,
    public_documents,
    refuse_queries,
)
from tfdpsq.data.texts import Document
from tfdpsq.validation import DataError, InputError

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


@pytest.mark.parametrize(
    "words, kept", [(2, False), (3, True), (25, True), (26, False)]
)
def test_queries_have_3_to_25_words(package, words, kept):
    root = package(a=f'"""{"w " * words}\n\n{BODY}"""')
    assert bool(_pairs_of(root)) == kept


@pytest.mark.parametrize("words, kept", [(14, False), (15, True)])
def test_documents_have_15_words_or_more(package, words, kept):
    root = package(a=f'"""One two three.\n\n{"w " * words}"""')
    assert bool(_pairs_of(root)) == kept


def test_tests_and_files_that_do_not_parse_are_left_out(package):
    source = f'"""In {{}} it stands.\n\n{BODY}"""'
    names = ["b", "sub__a", "tests__x", "test__y", "x_test", "test_x", "conftest"]
    root = package(**{name: source.format(name) for name in names}, broken='"""\n(')
    (root / "latin.py").write_bytes(b'"""\xe9 no coding line."""')
    assert [pair.summary for pair in _pairs_of(root)] == [
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


def test_no_query_stands_in_public_text(package, tmp_path, monkeypatch):
    root = package(
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
    beir = build_from(root, tmp_path / "cache", monkeypatch)
    assert set(beir.queries().values()) == {"Return the value.", "Set it up."}
    texts = [" ".join(found.text.split()) for found in public_documents(beir)]
    assert texts == [
        f"It is short. {BODY}",
        f"{BODY} y.",
        f"{BODY} x. Sort the list, or not.",
    ]
    assert [document.id for document in public_documents(beir)] == [
        *(document.id for document in beir.documents()),
        f"pydocs-{pydocs._identifier(texts[2])}",
    ]
    provenance = json.loads((beir.path / "provenance.json").read_text())
    assert provenance["further_public_texts"] == 1


def test_public_documents_of_any_beir_directory(package, tmp_path, monkeypatch):
    root = package(a=f'"""Return the value.\n\n{BODY}"""')
    beir = build_from(root, tmp_path / "cache", monkeypatch)
    path = beir.path / pydocs.PUBLIC_TEXT
    path.unlink()
    assert list(public_documents(beir)) == list(beir.documents())
    path.write_text('{"_id": "x", "text": "Some more."}\n')
    assert list(public_documents(beir))[1:] == [Document("x", "", "Some more.")]
    path.write_text('{"_id": "x", "text": "Some more."}\n{"_id": "y", "text": 3}\n')
    with pytest.raises(DataError, match=r"public\.jsonl:2: .*text"):
        list(public_documents(beir))


def test_a_file_with_a_query_is_refused(package, tmp_path, monkeypatch):
    root = package(a=f'"""Return the value.\n\n{BODY}"""')
    beir = build_from(root, tmp_path / "cache", monkeypatch)
    path = tmp_path / "more.jsonl"
    path.write_text('{"_id": "x", "text": "To return the value."}\n')
    refuse_queries(path, beir)
    with path.open("a") as file:
        file.write('{"_id": "y", "text": "So: return  the VALUE, or\\nreturn the\\n')
        file.write('value"}\n')
    with pytest.raises(DataError, match=r"more\.jsonl:2: .*'return the\\nvalue'"):
        refuse_queries(path, beir)


def test_a_folder_without_docstrings_is_an_error(package, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"no docstring was found.*sources \(.py\)"):
        build_from(package(a="x = 1"), tmp_path / "cache", monkeypatch)
    assert os.listdir(tmp_path / "cache") == []


def test_a_cached_corpus_is_not_built_again(tmp_path, monkeypatch):
    first = build_pydocs(tmp_path, ["absl", "requests"])
    monkeypatch.setattr(pydocs, "docstrings_of", lambda folder: pytest.fail("built"))
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


def test_another_version_of_the_code_is_another_corpus(tmp_path, monkeypatch):
    first = build_pydocs(tmp_path / "cache", ["absl"])
    here = Path(pydocs.__file__).parent
    for name in pydocs._DECIDING:
        copy = tmp_path / name
        copy.mkdir()
        for path in here.glob("*.py"):
            (copy / path.name).write_bytes(path.read_bytes())
        with (copy / f"{name}.py").open("a") as file:
            file.write("# changed\n")
        monkeypatch.setattr(pydocs, "__file__", str(copy / "pydocs.py"))
        assert build_pydocs(tmp_path / "cache", ["absl"]).path != first.path
    # A copy of all that is unchanged is the corpus that is there.
    (copy / f"{name}.py").write_bytes((here / f"{name}.py").read_bytes())
    assert build_pydocs(tmp_path / "cache", ["absl"]).path == first.path


def test_every_module_that_decides_a_corpus_is_part_of_its_key():
    """Else a cache would go on giving what older code made."""
    tree = ast.parse(Path(pydocs.__file__).read_text())
    used = {
        node.module.rpartition(".")[2]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tfdpsq.data.")
    }
    # What is left reads, or puts files where they belong.
    reading = {"beir", "beir_lines", "files", "texts"}
    assert used - reading == set(pydocs._DECIDING) - {"pydocs"}


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
def docstrings():
    """Those of each package's folder; parsing takes longest, so it is done once."""
    folders = {name: pydocs._folder(name) for name in PACKAGES}
    return {folder: list(docstrings_of(folder)) for folder in folders.values()}


@pytest.fixture(scope="module")
def corpus(docstrings):
    """The full corpus: from the user's cache where it is there, else built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pydocs, "docstrings_of", docstrings.__getitem__)
        return build_pydocs()


def test_zero_shot_sets_hold_next_to_nothing_that_was_trained_on(docstrings):
    """A corpus of the other packages has no query that is not among their summaries."""
    held = paper.get_config("tiny").held_out_packages

    def summaries(package):
        found = docstrings[pydocs._folder(package)]
        return {"".join(d.summary.casefold().split()) for d in found if d.is_pair}

    known = set().union(*map(summaries, set(PACKAGES) - set(held)))
    for package in held:
        assert len(summaries(package)) >= 85
        assert len(summaries(package) & known) <= 1


def test_the_full_corpus_is_what_the_readme_says(corpus):
    counts = corpus.validate(["train", "dev", "test"])
    total = sum(counts.pairs.values())
    assert total == counts.queries > 20_000
    assert total >= counts.documents > 0.9 * total
    # 10 %: the deviation of a binomial share is 0.2 % at this n; five of them.
    for split in ("dev", "test"):
        assert abs(counts.pairs[split] / total - 0.1) < 0.0105
    provenance = json.loads((corpus.path / "provenance.json").read_text())
    assert provenance["counts"].items() <= dataclasses.asdict(counts).items()
    assert provenance["fingerprint"] == corpus.fingerprint()


def test_no_query_is_a_sentence_of_the_public_text(corpus):
    """By a checker of its own: split at stops and line ends, lower-cased."""

    def plain(sentence):
        return " ".join(sentence.lower().split()).rstrip(".!?:; ")

    queries = {plain(text) for text in corpus.queries().values()}
    looked_at, found = 0, []
    for name in ("corpus.jsonl", "public.jsonl"):
        with (corpus.path / name).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                text = json.loads(line)["text"]
                # A sentence can go over several lines, or a line be one.
                for part in (*re.split(r"\n\s*\n", text), *text.splitlines()):
                    for sentence in re.split(r"(?<=[.!?])\s+", part):
                        looked_at += 1
                        if plain(sentence) in queries:
                            found.append((name, number, sentence))
    assert looked_at > 1_000_000
    assert found == []


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
