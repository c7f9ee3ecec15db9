"""Ten scripts through every stage that reads words: what is found, cut, mined, hidden.

`ten_scripts.json` has three documents of each script, and a query for each of them.
"""

import json
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import framed

from tfdpsq import retriever
from tfdpsq.data import Document, Tokenizer, write_beir
from tfdpsq.data.sets import read_synthetic
from tfdpsq.evaluation import read_trec_run
from tfdpsq.layers import T5Config
from tfdpsq.run.common import canary_set
from tfdpsq.run.common.documents import DocumentClusters
from tfdpsq.run.stages import canaries, mine, overlap, prepare

FILE = pathlib.Path(__file__).parents[1] / "helpers" / "ten_scripts.json"
SCRIPTS = json.loads(FILE.read_text("utf-8"))


def _named(kind):
    return {
        f"{script}-{n}": text
        for script, texts in SCRIPTS.items()
        for n, text in enumerate(texts[kind])
    }


DOCUMENTS, QUERIES = _named("documents"), _named("queries")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs in all scripts, a public set and a vocabulary of them, what was mined."""
    base = tmp_path_factory.mktemp("languages")
    judged = [(name, name, 1) for name in QUERIES]
    documents = [Document(name, "", text) for name, text in DOCUMENTS.items()]
    splits = {split: judged for split in ("train", "test")}
    write_beir(base / "pairs", documents, QUERIES.items(), splits)
    pairs, made = str(base / "pairs"), base / "prepare"
    sizes = {"vocabulary_size": 900, "pseudo_queries_per_document": 3}
    framed.run(prepare.STAGE, made, data=pairs, **sizes)
    framed.run(mine.STAGE, base / "private" / "mined", pairs=pairs)
    return base


@pytest.fixture(scope="module")
def searched(base):
    """Documents by exported and by direct search, each {query: ids}."""
    tf.keras.utils.set_random_seed(3)
    config = retriever.RetrieverConfig(T5Config(950, 1, 2, 16, 24, 8), 16)
    tokenizer = Tokenizer(base / "prepare" / prepare.VOCABULARY)
    model = retriever.TwoTower(config, tokenizer)
    ids, vectors = list(DOCUMENTS), {}
    for part, texts in (("document", DOCUMENTS), ("query", QUERIES)):
        vectors[part] = retriever.encode_texts(model, list(texts.values()), part)
    retriever.SearchModel(model, ids, vectors["document"]).export(base / "exported")
    loaded = tf.saved_model.load(str(base / "exported"))
    found = loaded.search(tf.constant(list(QUERIES.values())), tf.constant(3))
    exported = [[name.decode() for name in row] for row in found["ids"].numpy()]
    order = np.argsort(-(vectors["query"] @ vectors["document"].T), axis=1)[:, :3]
    return exported, [[ids[n] for n in row] for row in order]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bm25_finds_pseudo_queries_are_made_and_exported_search_agrees(
    script, base, searched
):
    own = [name for name in QUERIES if name.startswith(script)]
    run = read_trec_run(base / "private" / "mined" / mine.RUN_FILE)
    assert [next(iter(run[name])) for name in own] == own
    made = [row for row in read_synthetic(base / "prepare" / "set")]
    made = [row for row in made if row.document_id in own]
    # Three sentences of each document, or, in Thai, three clauses.
    assert len(made) == 9 == len({row.query for row in made})
    assert all(row.query in DOCUMENTS[row.document_id] for row in made)
    assert not any(row.query.endswith((".", "।", "。")) for row in made)
    places = [list(QUERIES).index(name) for name in own]
    exported, direct = ([found[n] for n in places] for found in searched)
    assert exported == direct


def test_overlap_finds_what_stands_inside_longer_texts(base):
    lines = [f"{text} {text}\n" for name, text in QUERIES.items() if "-0" in name]
    (base / "corpus.txt").write_text("".join(lines), "utf-8")
    changes = {"data": str(base / "pairs"), "corpus": (str(base / "corpus.txt"),)}
    out = base / "private" / "overlap"
    framed.run(overlap.STAGE, out, **changes)
    found = json.loads((out / overlap.OVERLAP_FILE).read_text())["queries"]
    assert found["contained"]["share"] == pytest.approx(1 / 3)
    assert found["equal"]["share"] == 0


def test_canaries_stand_in_queries_of_every_script(base):
    out = base / "private" / "canaries"
    changes = {"trials": 15, "repetitions": (1,), "forms": ("own_document",)}
    framed.run(canaries.STAGE, out, data=str(base / "pairs"), **changes)
    made = canary_set.read_canaries(out)
    assert len(made) == 15 and all(canary.prefix in canary.query() for canary in made)
    assert {c.prefix for c in made} <= {text[:24] for text in QUERIES.values()}


@pytest.mark.parametrize("script", ["Chinese", "Japanese", "Thai"])
def test_clusters_are_by_words_where_nothing_parts_them(script):
    """A stretch between two marks was one word, and shared with no other text."""
    texts = SCRIPTS[script]["documents"]
    texts = [*texts, *(re.sub("[。、，！ ]", "", text) for text in texts)]
    documents = [Document(str(n), "", text) for n, text in enumerate(texts)]
    found = DocumentClusters.fit(lambda: documents, 3, seed=0).of(texts)
    assert len({*found}) == 3 and (found[:3] == found[3:]).all()
