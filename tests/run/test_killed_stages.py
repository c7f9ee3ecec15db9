"""Every stage, killed with SIGKILL at random moments, and started again.

The same command finishes, each step is paid once, and at no moment is anything private
outside `private/`.
"""

import json
import os
import random
import time

import pytest
from helpers import forking, killing, tiny
from helpers.secret_search import Secret, find_secrets

from tfdpsq.privacy.checkpoint import SECRETS, STATE
from tfdpsq.run.frame import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

_SEED = 7
_KILLS = 4  # of each command, at most
_T5 = {"document_length": 24, "query_length": 10, "batch_size": 8, "steps": 8}
_PRIVATE = {"n_is_public": True, "accountant": "rdp"}


def _commands(base):
    """Yields name of the output, stage and settings, in the order of a job."""
    release, private = base / "work" / "release", base / "work" / "private"
    pairs, public, given = private / "pairs", base / "start" / "public", base / "start"
    yield (
        pairs,
        "import",
        {
            **{f"logs.{at}": f"{base}/{at}.tsv" for at in ("train", "dev", "test")},
            **{"columns.query": "", "columns.query_id": "0", "header": False},
            **{"columns.document": "", "columns.document_id": "1"},
            "queries.path": given / "pairs/queries.jsonl",
            **{"queries.query_id": "_id", "queries.query": "text"},
            "corpus.path": given / "pairs/corpus.jsonl",
            **{"corpus.document_id": "_id", "corpus.document": "text"},
        },
    )
    yield release / "prepare", "prepare", {"data": pairs, "vocabulary_size": 320}
    yield (
        *(release / "pretrained", "pretrain"),
        {"data": pairs, "init": public, "held_out_one_in": 8, **_T5},
    )
    counted = {"pairs": pairs, "epsilon": 0.5, "clusters": 8, **_PRIVATE}
    yield release / "histogram", "histogram", counted
    trained = {"pairs": pairs, "init": public, **_T5, **_PRIVATE}
    trained |= {"steps": 32, "save_every": 2}
    yield release / "generator", "finetune", trained
    written = {"generator": release / "generator", "corpus": pairs, "batch_size": 16}
    yield release / "synthetic", "synthesize", {**written, "shard_documents": 16}
    kept = {"synthetic": release / "synthetic", "corpus": pairs, "duplicates": True}
    yield release / "filtered", "filter", kept
    yield private / "mined", "mine", {"pairs": pairs}
    by_set = {"pairs": release / "filtered" / "set", "init": public, **_T5}
    yield release / "retriever", "train_retriever", {**by_set, "embedding_dim": 16}
    direct = {**trained, "method": "public_negatives", "epsilon": 8.0, "negatives": 4}
    yield release / "direct", "train_retriever", {**direct, "embedding_dim": 16}
    embedded = {"retriever": release / "retriever", "corpus": pairs}
    yield release / "embedded", "embed", {**embedded, "shard_documents": 32}
    mapped = {"documents": base / "embedded", "queries": base / "embedded", "steps": 8}
    mapped |= {"pairs": pairs, "encoder_is_public": True, "epsilon": 8.0, **_PRIVATE}
    yield release / "adapter", "train_adapter", mapped
    yield release / "reranker", "rerank", {"generator": release / "generator"}
    converted = {"input": release / "generator", "format": "keras"}
    yield release / "converted", "convert", converted
    yield private / "evaluation", "evaluate", {"data": pairs, "resamples": 50}
    made = {"data": pairs, "trials": 1, "repetitions": "(2,)", "candidates": 20}
    yield private / "canaries", "canaries", {**made, "coins": 24, "digits": 8}
    audited = {**trained, "pairs": private / "canaries" / "data", "query_length": 48}
    yield private / "audited", "finetune", audited
    attacked = {"canaries": private / "canaries", "generator": private / "audited"}
    yield private / "audit", "audit", {**attacked, "members": 10}
    texts = {"data": pairs, "corpus": f'("{base}/texts.txt",)', "draws": 1}
    yield private / "overlap", "overlap", texts


def _write_inputs(base):
    """Writes pairs, a public T5, embeddings, and a corpus; returns the queries."""
    queries = tiny.write_start(base / "start", further=(" ".join("0123456789"),) * 40)
    for path in (base / "start" / "pairs" / "qrels").glob("*.tsv"):
        rows = path.read_text().splitlines(True)[1:]
        (base / path.name).write_text("".join(rows))
    tiny.write_embedded(base / "embedded")
    (base / "texts.txt").write_text("\n".join([*queries[:3], "something else"]))
    return queries


def _secrets(work, queries):
    """Returns what is private at this moment: queries, the key, and all seeds."""
    found = {Secret("a private query", query) for query in queries}
    key = work / "private" / records.KEY_FILE
    if key.is_file():
        found.add(Secret("the key", key.read_text().strip()))
    for path in work.glob(f"private/runs/*/{STATE}/{SECRETS}"):
        for name, value in json.loads(path.read_text()).items():
            if isinstance(value, int) and value.bit_length() >= 48:
                found.add(Secret(f"{name} of {path.parts[-3]}", value))
    return found


def test_stages_killed_at_random_moments_go_on(tmp_path):
    draw, killed, seeds = random.Random(_SEED), 0, set()
    queries, work = _write_inputs(tmp_path), tmp_path / "work"

    def nothing_is_outside():
        private = work / "private"  # nobody else can look into it
        assert not private.exists() or private.stat().st_mode & 0o077 == 0
        found = _secrets(work, queries)
        seeds.update(one for one in found if one.name != "a private query")
        outside = [path for path in work.glob("*") if path.name != "private"]
        assert not [line for each in outside for line in find_secrets(each, found)]

    for out, stage, settings in _commands(tmp_path):
        words = killing.command(stage, out, settings, configured=False)
        for number in range(_KILLS):
            child = forking.Command(words, cwd=killing.ROOT)
            # First among steps that are paid, if there are any.
            paying = number == 0 and "save_every" in settings
            begun = "a step takes" if paying else ("", ": started")[number % 2]
            while child.poll() is None and begun not in child.said()[1]:
                time.sleep(0.01)
            stop = time.monotonic() + draw.uniform(0.0, 1.0 if paying else 2.0)
            while child.poll() is None and time.monotonic() < stop:
                time.sleep(0.01)
            if child.poll() is not None:
                assert child.returncode == 0, child.said()[1][-3000:]
                break
            child.kill()
            child.wait()
            killed += 1
            nothing_is_outside()
        print(f"{stage}: killed {killed} times so far, seed {_SEED}")
        done = forking.run(words, cwd=killing.ROOT)
        assert done.returncode == 0, f"{stage}: {done.stderr[-3000:]}"
        assert records.read_stage(out)["stage"] == stage
        nothing_is_outside()
        again = forking.run(words, cwd=killing.ROOT)
        assert again.returncode == 0 and "not made again" in again.stderr
    assert killed >= 30
    for ledger in sorted(work.glob("private/runs/*/ledger.jsonl")):
        rows = [json.loads(line) for line in ledger.read_text().splitlines()[1:]]
        paid = [row["step"] for row in rows]
        assert paid == sorted(set(paid)), ledger
    # What is left of a finished run gives no noise away.
    gone = [one for one in seeds if one.name != "the key"]
    assert gone and not find_secrets(work, gone)
    assert not [*work.glob("private/partial/*"), *work.glob(f"private/runs/*/{STATE}")]
    assert os.listdir(work / "private" / "locks")
