"""Stage `encode` on queries: those of sets carry a guarantee, private ones stay in."""

import json
import math
import shutil

import numpy as np
import pytest
from helpers import plans
from helpers import tiny as _tiny

from tfdpsq import privacy, retriever
from tfdpsq.data import (
    BeirDirectory,
    Tokenizer,
    any_files,
    train_vocabulary,
)
from tfdpsq.run import encode
from tfdpsq.run.core import layout
from tfdpsq.run.passes import (
    corpus_shards,
    embedding,
    passes,
    query_sets,
    sharded_stages,
)
from tfdpsq.validation import DataError, InputError

_QUERIES = embedding.QUERIES


def _certificate(epsilon):
    plan = plans.plan(
        epsilon=epsilon, num_units=400, n_is_public=True, batch_size=8, steps=4
    )
    return plans.certificate(plan)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, a public retriever with two towers, and a synthetic set of 50 queries."""
    base = tmp_path_factory.mktemp("encode_queries")
    queries = _tiny.write_pairs(base / "pairs")
    train_vocabulary(queries, 320, base / "spiece.model")  # a test's made-up queries
    _tiny.write_retriever(base / "retriever", base, shared=False)
    _write_set(base / "set", _certificate(8.0))
    return base


def _write_set(directory, certificate):
    rows = ((f"sorts a list {i}", f"d{i % 20}", "text") for i in range(50))
    _tiny.write_set(directory, rows, certificate, shards=2)


def _config(base, **changes):
    return _tiny.config(
        encode,
        changes,
        retriever=str(base / "retriever"),
        vocabulary=str(base / "spiece.model"),
        corpus=str(base / "pairs"),
        texts=_QUERIES,
        shard_documents=20,
    )


def _expected(base, queries):
    """Ids, and embeddings by the query tower, all in one go."""
    return list(queries), retriever.encode_texts(
        retriever.load(base / "retriever" / layout.RETRIEVER_MODEL),
        queries.values(),
        Tokenizer(base / "spiece.model"),
        "query",
        progress=False,
    )


def _is_of(base, out, queries):
    held = retriever.DocumentIndex(out / _QUERIES)
    held.verify()
    ids, vectors = _expected(base, queries)
    assert list(held.ids()) == ids
    np.testing.assert_allclose(held.embeddings(), vectors, rtol=0, atol=1e-6)
    assert not (out / embedding.DOCUMENTS).exists()


def _reads(directory):
    path = directory / "private_reads.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def test_queries_of_a_set_carry_its_certificate(base, tmp_path):
    config = _config(base, corpus=str(base / "set"))
    assert encode.run(config, tmp_path / "out", passes.Launch(2, 1)) is None
    shards = tmp_path / ".out.shards"
    held = json.loads((shards / sharded_stages.GUARANTEE_FILE).read_text())
    certificate = privacy.read_certificate(base / "set")
    assert held["certificate"] == certificate
    stage = encode.run(config, tmp_path / "out")
    assert stage["result"] == {"queries": 50, "private": False}
    assert privacy.read_certificate(tmp_path / "out") == certificate
    rows = (base / "set" / "beir" / "queries.jsonl").read_text().splitlines()
    queries = {row["_id"]: row["text"] for row in map(json.loads, rows)}
    assert len(queries) == 50
    _is_of(base, tmp_path / "out", queries)
    assert not _reads(tmp_path / "private")


def test_private_queries_are_embedded_where_they_may_lie(base, tmp_path):
    out = tmp_path / "private" / "out"
    config = _config(base)
    assert encode.run(config, out, passes.Launch(2, 1)) is None
    assert not (out.parent / ".out.shards" / sharded_stages.GUARANTEE_FILE).exists()
    stage = encode.run(config, out, passes.Launch(2, 0))
    assert stage["result"] == {"queries": 12, "private": True}
    beir = BeirDirectory(base / "pairs")
    judged = beir.qrels("test")
    queries = {name: text for name, text in beir.queries().items() if name in judged}
    assert len(queries) == 12
    _is_of(base, out, queries)
    # Recorded once, by whichever of two commands; and nothing says it is covered.
    assert _reads(out.parent) == [
        {
            "what": "the queries of split 'test'",
            "where": "out/queries, and whatever is made from it",
        }
    ]
    with pytest.raises(DataError, match="depends on private queries, and no certif"):
        privacy.read_certificate(out)
    assert out.parent.stat().st_mode & 0o077 == 0  # made by the stage, for the owner
    inputs = json.loads((out / "stage.json").read_text())["inputs"]
    assert inputs["queries"].startswith("keyed:") and "corpus" not in inputs


@pytest.mark.parametrize(
    ("out", "changes", "message"),
    [
        (
            "out",
            {},
            "are private, and an embedding reveals .* Write them under .*private",
        ),
        ("release/out", {"private_directory": "{here}/hidden"}, "under .*hidden inst"),
        ("private/out", {"strict": True}, "strict mode refuses .* of split 'test'"),
        ("private/out", {"split": "tets"}, "split is 'tets'; choose one of"),
        ("private/out", {"texts": "answers"}, "texts is 'answers'; choose one of"),
        ("ram://w/out", {}, "ram://w/out; this stage writes to local paths"),
    ],
)
def test_private_queries_are_refused_before_they_are_read(
    base, tmp_path, out, changes, message
):
    given = {
        name: value.replace("{here}", str(tmp_path)) if name != "strict" else value
        for name, value in changes.items()
    }
    place = out if "://" in out else tmp_path / out
    with pytest.raises(InputError, match=message):
        encode.run(_config(base, **given), place)
    assert not list(tmp_path.rglob("*.npy")) and not _reads(tmp_path / "private")
    assert not list(tmp_path.rglob("plan.json"))


def test_judgements_of_a_query_that_is_not_there_are_named(base, tmp_path):
    pairs = tmp_path / "pairs"
    _tiny.write_pairs(pairs)
    with (pairs / "qrels" / "test.tsv").open("a") as file:
        file.write("gone\td1\t1\n")
    with pytest.raises(DataError, match="test.tsv: query 'gone' is not in"):
        encode.run(_config(base, corpus=str(pairs)), tmp_path / "private" / "out")
    assert not _reads(tmp_path / "private")


def test_queries_declared_public_are_no_read_and_take_the_encoder_s_guarantee(
    base, tmp_path
):
    config = _config(base, private=False, strict=True, split="dev")
    own = _certificate(4.0)
    found = query_sets.open_queries(config, tmp_path / "out", _QUERIES, own)
    assert found.certificate == own and not found.private
    assert not found.fingerprint.startswith("keyed:")
    judged = BeirDirectory(base / "pairs").qrels("dev")
    assert query_sets.judged_in(found) == judged.keys() and len(judged) == 12
    assert not list(tmp_path.iterdir())


def test_private_pairs_declared_public_are_named(base, tmp_path):
    """The error blamed the retriever, a public one."""
    pairs = tmp_path / "imported"
    shutil.copytree(base / "pairs", pairs)
    (pairs / "stage.json").write_text('{"guarantee": "private"}')
    config = _config(base, private=False, split="dev", corpus=str(pairs))
    with pytest.raises(InputError, match="embeddings of texts in .*imported, whose"):
        encode.run(config, tmp_path / "release" / "out")


def test_guarantees_of_a_set_and_of_another_retriever_do_not_add_up(base, tmp_path):
    """Neither covers both; one without any protection decides."""
    config = _config(base, corpus=str(base / "set"))
    of_set = privacy.read_certificate(base / "set")

    def guaranteed(encoder):
        out = tmp_path / "out"
        return query_sets.open_queries(config, out, _QUERIES, encoder).certificate

    with pytest.raises(InputError, match="epsilons would add up"):
        guaranteed(_certificate(4.0))
    assert guaranteed(None) == of_set
    assert guaranteed(of_set) == of_set  # of a retriever trained on the set
    unprotected = _certificate(math.inf)
    assert guaranteed(unprotected) == unprotected and not unprotected["private"]


def test_a_set_may_lie_on_an_object_store_and_private_queries_may_not(base, tmp_path):
    remote = f"ram:/{tmp_path}"
    for name in ("set", "pairs"):
        any_files.copy_tree(str(base / name), f"{remote}/{name}")
    config = _config(base, corpus=f"{remote}/set")
    found = query_sets.open_queries(config, f"{remote}/out", _QUERIES, None)
    assert found.certificate == privacy.read_certificate(base / "set")
    parts = corpus_shards.cut_file(found.file, 0, 20, f"{remote}/.out.shards")
    assert [parts.size(index) for index in range(parts.count)] == [16, 17, 17]
    assert [text.id for text in parts.read(1)] == [f"genQ{i}" for i in range(16, 33)]
    config = _config(base, corpus=f"{remote}/pairs")
    with pytest.raises(InputError, match="pairs, where there is no synthetic"):
        query_sets.open_queries(config, tmp_path / "private" / "out", _QUERIES, None)


def test_a_set_that_was_changed_is_refused(base, tmp_path):
    shutil.copytree(base / "set", tmp_path / "set")
    queries = tmp_path / "set" / "beir" / "queries.jsonl"
    queries.write_text(queries.read_text().replace("list 7", "list 8"))
    with pytest.raises(DataError, match="queries.jsonl: SHA-256 is"):
        encode.run(_config(base, corpus=str(tmp_path / "set")), tmp_path / "out")


def test_hashes_of_a_log_are_not_kept_where_one_split_of_it_is_public(base, tmp_path):
    """The file has the queries of all splits; half of the pass is made."""
    out = tmp_path / "release" / "queries"
    config = _config(base, private=False, shard_documents=30)
    assert encode.run(config, out, passes.Launch(2, 1)) is None
    kept = list((tmp_path / "release").rglob("*.json"))
    assert kept and not any(path.name == corpus_shards.PLAN_FILE for path in kept)
    assert encode.run(config, out, passes.Launch(2, 0))["result"]["queries"] == 12
    # Of a public set it is, which saves a reading.
    public = _config(base, corpus=str(base / "set"), shard_documents=30)
    encode.run(public, tmp_path / "release" / "set", passes.Launch(2, 1))
    assert list((tmp_path / "release").rglob(corpus_shards.PLAN_FILE))
