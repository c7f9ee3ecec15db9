"""Stage `rerank`: the search that it exports ranks as `evaluate` measured."""

import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.evaluation.ranking import trec
from tfdpsq.privacy import read_certificate
from tfdpsq.run import evaluate, rerank
from tfdpsq.run.core import spending
from tfdpsq.validation import DataError, InputError

_LENGTHS = {"document_length": 20, "query_length": 6}


def _config(start, **changes):
    return _tiny.config(
        rerank,
        changes,
        generator=str(start / "generator"),
        corpus=str(start / "pairs"),
        **_LENGTHS,
    )


def _measured(start, **changes):
    """The run that `evaluate` measures."""
    config = evaluate.default_config()
    config.data = str(start / "pairs")
    config.resamples = 100
    with config.unlocked():
        config.systems = {"words": "bm25"}
        config.rerankers = {"one": str(start / "generator")}
        config.rerank.update({"base": "words", **_LENGTHS, **changes})
    evaluate.run(config, start / "private" / "out")
    return evaluation.read_trec_run(start / "private" / "out" / "runs" / "one.trec")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Pairs, a generator with a certificate, and the search exported for both."""
    start = tmp_path_factory.mktemp("rerank")
    _tiny.write_start(start)
    _tiny.write_private_generator(start / "generator", start / "public", 8.0)
    stage = rerank.run(_config(start, depth=3, weight=0.6), start / "made")
    assert stage["result"] == {"documents": 84}
    return start


def test_an_exported_search_ranks_as_evaluate_measured(start):
    run = _measured(start, depth=3, weight=0.6)
    queries = BeirDirectory(start / "pairs").queries()
    texts = {**{query: queries[query] for query in run}, "none": "xyzzy"}
    search = tf.saved_model.load(str(start / "made" / "search")).signatures["search"]
    few, every = (
        search(texts=tf.constant(list(texts.values())), k=tf.constant(k))
        for k in (2, 1000)
    )
    deeper = 0
    for place, query in enumerate(texts):
        expected = run.get(query, {})
        ids = [each.decode() for each in every["ids"][place].numpy()]
        scores = every["scores"][place].numpy()
        there = len(ids) - ids.count("")
        assert "" not in ids[:there] and len(set(ids[:there])) == there
        # `evaluate` keeps the best 100 of BM25's; there are 84 documents.
        assert set(ids[:there]) == set(expected)
        np.testing.assert_allclose(
            scores[:there], [expected[name] for name in ids[:there]], rtol=1e-4
        )
        assert np.isneginf(scores[there:]).all()
        deeper += there > 3
        assert [each.decode() for each in few["ids"][place].numpy()] == ids[:2]
        assert ids[3:there] == [name for name, _ in trec.ranked(expected)][3:]
    assert deeper and ids == [""] * 84


def test_a_search_is_as_private_as_its_generator(start, tmp_path):
    """It holds all weights; `--budget` took a copy of it for nothing."""
    unprotected = tmp_path / "private" / "generator"
    _tiny.write_private_generator(unprotected, start / "public", math.inf)
    config = _config(start, generator=str(unprotected))
    with pytest.raises(InputError, match="must stay private"):
        rerank.run(config, tmp_path / "job" / "release" / "search")
    certificate = read_certificate(start / "generator")
    assert read_certificate(start / "made") == certificate
    copy = tmp_path / "other" / "release" / "copy"
    shutil.copytree(start / "made" / "search", copy)
    found = spending.find_certificates(str(tmp_path / "other"))
    assert list(found.refused) == [str(copy / "certificate.json")]
    with pytest.raises(DataError, match="missing"):
        read_certificate(copy)
    shutil.copy(start / "made" / "certificate.json", copy)
    assert read_certificate(copy) == certificate


def test_a_corpus_with_an_id_twice_is_refused(start, tmp_path):
    shutil.copytree(start / "pairs", tmp_path / "twice")
    with (tmp_path / "twice" / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"_id": "d0", "text": "another"}\n')
    with pytest.raises(DataError, match="corpus.jsonl:85: .*'d0'"):
        rerank.run(_config(start, corpus=str(tmp_path / "twice")), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
