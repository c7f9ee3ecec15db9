"""Stage `rerank`: the search that it exports ranks as `evaluate` measured."""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import tiny as _tiny

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory
from tfdpsq.evaluation.ranking import trec
from tfdpsq.privacy import read_certificate
from tfdpsq.run import evaluate, rerank
from tfdpsq.run.core import spending
from tfdpsq.validation import DataError, InputError

_LENGTHS = {"document_length": 20, "query_length": 6}
_IN_A_NEW_PROCESS = """
import json, sys
import tensorflow as tf
import tensorflow_text
assert "tfdpsq" not in sys.modules
search = tf.saved_model.load(sys.argv[1]).signatures["search"]
results = []
for k in (2, 1000):
    found = search(texts=tf.constant(json.load(open(sys.argv[2]))), k=tf.constant(k))
    ids = [[i.decode() for i in row] for row in found["ids"].numpy()]
    results.append([ids, found["scores"].numpy().tolist()])
print(json.dumps(results))
"""


def _config(start, **changes):
    return _tiny.config(
        rerank,
        changes,
        generator=str(start / "public"),
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
        config.rerankers = {"one": str(start / "public")}
        config.rerank.update({"base": "words", **_LENGTHS, **changes})
    evaluate.run(config, start / "private" / "out")
    return evaluation.read_trec_run(start / "private" / "out" / "runs" / "one.trec")


@pytest.mark.parametrize(
    "lines, message",
    [
        ([0, 1, 0], r"corpus.jsonl:3: .*'d0'"),
        ([], "corpus.jsonl: holds no document"),
    ],
)
def test_a_corpus_that_repeats_or_lacks_documents_is_named(tmp_path, lines, message):
    _tiny.write_pairs(tmp_path / "pairs")
    file = tmp_path / "pairs" / "corpus.jsonl"
    held = file.read_text().splitlines(keepends=True)
    file.write_text("".join(held[line] for line in lines))
    with pytest.raises(DataError, match=message):
        config = _config(tmp_path, generator="t5_tiny_pydocs")
        rerank.run(config, tmp_path / "out")


def test_an_exported_search_ranks_as_evaluate_measured(tmp_path):
    _tiny.write_start(tmp_path)
    own = {"depth": 3, "weight": 0.6}
    run = _measured(tmp_path, **own)
    stage = rerank.run(_config(tmp_path, **own), tmp_path / "made")
    assert stage["result"] == {"documents": 84}
    beir = BeirDirectory(tmp_path / "pairs")
    texts = {query: beir.queries()[query] for query in run}
    texts["none"] = "xyzzy"
    (tmp_path / "queries.json").write_text(json.dumps(list(texts.values())))
    found = subprocess.run(
        [
            *(sys.executable, "-c", _IN_A_NEW_PROCESS),
            *(str(tmp_path / "made" / "search"), str(tmp_path / "queries.json")),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    few, every = json.loads(found.stdout.splitlines()[-1])
    deeper = 0
    for place, query in enumerate(texts):
        expected = run.get(query, {})
        ids, scores = every[0][place], every[1][place]
        there = len(ids) - ids.count("")
        assert "" not in ids[:there] and len(set(ids[:there])) == there
        # `evaluate` keeps the best 100 of BM25's; there are 84 documents.
        assert set(ids[:there]) == set(expected)
        np.testing.assert_allclose(
            scores[:there], [expected[name] for name in ids[:there]], rtol=1e-4
        )
        assert np.isneginf(scores[there:]).all()
        deeper += there > 3
        assert [ids[:2], scores[:2]] == [few[0][place], few[1][place]]
        ranked = [name for name, _ in trec.ranked(expected)]
        assert ids[3:there] == ranked[3:]
    assert deeper and every[0][-1] == [""] * 84


def test_a_search_is_as_private_as_its_generator(tmp_path):
    """A search by an unprotected generator must not be released."""
    _tiny.write_start(tmp_path)
    generator = tmp_path / "private" / "generator"
    _tiny.write_private_generator(generator, tmp_path / "public", math.inf)
    config = _config(tmp_path, generator=str(generator))
    with pytest.raises(InputError, match="must stay private"):
        rerank.run(config, tmp_path / "job" / "release" / "search")


@pytest.mark.parametrize("epsilon", [8.0, math.inf])
def test_a_search_that_is_copied_alone_asks_for_its_certificate(tmp_path, epsilon):
    """It holds all weights; `--budget` took a release of it for nothing."""
    _tiny.write_start(tmp_path)
    generator = tmp_path / "private" / "generator"
    _tiny.write_private_generator(generator, tmp_path / "public", epsilon)
    out = tmp_path / "job" / "made"
    rerank.run(_config(tmp_path, generator=str(generator)), out)
    assert read_certificate(out)["private"] == math.isfinite(epsilon)
    copy = tmp_path / "other" / "release" / "copy"
    shutil.copytree(out / "search", copy)
    try:
        refused = list(spending.find_certificates(str(tmp_path / "other")).refused)
    except InputError:  # nothing was found
        refused = []
    assert refused == [str(copy / "certificate.json")]
    with pytest.raises(DataError, match="missing, while config.json says"):
        read_certificate(copy)
    shutil.copy(out / "certificate.json", copy)
    assert read_certificate(copy) == read_certificate(out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator": ""}, "generator is ''. Give it what finetune wrote"),
        ({"generator": "/no/such"}, "generator is /no/such, which cannot order"),
        ({"generator": "@/pairs"}, "generator is .*/pairs, which cannot order"),
        ({"depth": 1}, "depth is 1"),
        ({"weight": 1.5}, "weight is 1.5"),
        ({"weight": 0.0}, "weight is 0"),
    ],
)
def test_bad_settings_are_refused(tmp_path, changes, message):
    (tmp_path / "pairs").mkdir()
    changes = {
        name: value.replace("@", str(tmp_path)) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    config = _config(tmp_path, **{"generator": "t5_tiny_pydocs", **changes})
    with pytest.raises(InputError, match=message):
        rerank.run(config, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
