"""The main job end to end, at a tiny size, as its users run it."""

import json
import math
import os
import pathlib
import runpy
import stat
import subprocess
import sys

import pytest
import tensorflow as tf
from helpers import tiny as _tiny
from helpers import tiny_job as _tiny_job

from tfdpsq import evaluation, results, validation
from tfdpsq.data import BeirDirectory, read_synthetic, verify
from tfdpsq.privacy import accounting, read_certificate, verify_certificate
from tfdpsq.run import finetune, forget, pipeline, status
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import pipeline_checks, pipeline_data, sources, workdir
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def finished(job):
    """The finished workdir, its config file, and the private queries."""
    return job.directory, job.config, job.queries


def test_a_killed_job_goes_on_where_it_was(job):
    directory, before = job.directory, job.before
    after = _tiny_job.stages(directory)
    made = "prepare public_model mined adapter_inf adapter_eps8 adapter_eps0_5 "
    made += "canaries histogram_eps0.4 generator_inf"
    assert {path.parent.name for path in before} == set(made.split())
    assert all(after[path] == changed for path, changed in before.items())
    assert not list(directory.rglob("*.partial"))
    assert "| synthetic_eps8 | " in job.table


def test_results_have_every_row_with_numbers_that_can_be_true(finished):
    directory, _, _ = finished
    results = json.loads((directory / "results.json").read_text())
    expected = (
        "bm25 untrained public_only original synthetic_inf synthetic_eps8 direct_eps8 "
        "encoder adapter_inf adapter_eps8 adapter_eps0_5 reranked_public_only "
        "reranked_inf reranked_eps8"
    )
    assert [row["name"] for row in results["rows"]] == expected.split()
    for row in results["rows"]:
        assert 0 <= row["ndcg@10"] <= 1 and 0 <= row["recall@10"] <= 1
        low, high = row["ndcg@10_ci"]
        assert low <= row["ndcg@10"] <= high
    epsilons = {row["name"]: row["epsilon"] for row in results["rows"]}
    assert epsilons["bm25"] is epsilons["untrained"] is epsilons["public_only"] is None
    assert epsilons["original"] == epsilons["synthetic_inf"] == "inf"
    assert epsilons["reranked_inf"] == "inf"
    assert epsilons["reranked_public_only"] is None
    for name in ("synthetic_eps8", "direct_eps8", "adapter_eps8", "reranked_eps8"):
        assert 7.8 <= epsilons[name] <= 8.0  # spent, not the target
    assert results["seconds"]["generator_eps8"] > 0
    assert 0.1 < results["peak_memory_gib"] < 24
    assert results["versions"]["tensorflow"].startswith("2.15")
    assert set(results["fingerprints"]) == {"corpus", "pairs", "code"}


def test_weights_that_saw_private_queries_are_no_start(finished, tmp_path):
    directory, _, _ = finished
    config = _tiny.tiny_config(directory.parent / "pairs")
    config.init = str(directory / "private" / "generator_inf")
    config.pretrain.t5 = pipeline.default_config().pretrain.t5  # the weights decide
    with pytest.raises(validation.InputError, match="init is .* trained on private"):
        pipeline.run(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_each_output_uses_a_part_of_the_config(finished):
    """A part that none used may change: see `workdir.open_workdir`."""
    places, used = (finished[0] / name for name in ("release", "private")), set()
    for path in (path for place in places for path in place.iterdir() if path.is_dir()):
        parts = pipeline_checks.USED_BY.items()
        of = {part for part, names in parts if any(n in path.name for n in names)}
        assert of or path.name in ("runs", "logs"), path
        used |= of
    assert used == {*pipeline_checks.USED_BY}


def test_certificates_follow_from_the_steps_that_ran(finished):
    directory, _, _ = finished
    certificate = read_certificate(directory / "release" / "generator_eps8")
    accounts, sampler = certificate["accounting"], certificate["sampler"]
    assert accounts["steps_executed"] == 3 and sampler["n"] == 60
    assert certificate["guarantee"]["delta"] == 1 / 120
    spent = accounting.epsilon_of(
        certificate["mechanism"]["noise_multiplier"],
        sampler["expected_batch_size"] / sampler["n"],
        accounts["steps_executed"],
        1 / 120 - accounts["delta_for_truncation"],
        "rdp",
    )
    continuation = certificate["continuation"]
    assert continuation["epsilon_of_this_run"] == pytest.approx(spent)
    counted = read_certificate(directory / "release" / "histogram_eps0.4")
    assert continuation["parent"] == counted  # both within 8
    assert spent < certificate["guarantee"]["epsilon"] <= 8.0
    direct = read_certificate(directory / "release" / "retriever_direct_eps8")
    mechanism, rows = direct["mechanism"], direct["sampler"]["max_batch_size"]
    assert mechanism["sensitivity"] == pytest.approx(
        (2 * rows - 1) * mechanism["clip_norm"]
    )
    assert mechanism["noise_stddev"] == pytest.approx(
        mechanism["noise_multiplier"] * mechanism["sensitivity"]
    )
    # What was trained on the synthetic set has the set's guarantee, no more.
    for name in ("synthetic_eps8/set", "retriever_synthetic_eps8"):
        assert read_certificate(directory / "release" / name) == certificate
    unprotected = read_certificate(directory / "private" / "generator_inf")
    assert unprotected["private"] is False
    assert unprotected["guarantee"]["epsilon"] == "inf"


def test_every_stage_before_the_evaluation_has_the_jobs_seed(finished):
    seeds = {
        path.parent.name: json.loads(path.read_text())["config"].get("seed")
        for path in finished[0].glob("*/*/stage.json")
    }
    assert seeds.pop("mined") is None  # nothing is drawn
    assert seeds.pop("evaluation") == 0
    assert seeds.pop("canaries") == -1  # drawn afresh: a seed would tell the secrets
    assert len(seeds) >= 11 and set(seeds.values()) == {5}


def test_nothing_under_release_gives_a_private_query_away(finished):
    """Neither queries nor curves, seeds or a hash that guesses can be tested on."""
    directory, _, queries = finished
    pairs_hash = BeirDirectory(directory.parent / "pairs").fingerprint()
    key = (directory / "private" / "fingerprint.key").read_text()
    names = []
    for path in (directory / "release").rglob("*"):
        names.append(path.name)
        if not path.is_file():
            continue
        content = path.read_bytes()
        assert pairs_hash.encode() not in content, path
        assert key.encode() not in content, path
        for query in queries:
            assert query.encode() not in content, (path, query)
    assert "certificate.json" in names
    assert not any(
        "curve" in name or "seed" in name or "tfevents" in name for name in names
    )


def test_canaries_are_audited_reported_and_stay_private(finished):
    directory, _, _ = finished
    made = canary_set.read_canaries(directory / "private" / "canaries")
    found = json.loads(
        (directory / "private" / "audit_eps8" / "audit.json").read_text()
    )
    assert found["epsilon_certified"] <= 8.0
    assert {entry["form"] for entry in found["canaries"]} == {
        *canary_set.OUR_FORMS,
        "all",
    }
    page = (directory / "report.html").read_text()
    assert "What leaked" in page and "Generator, ε = 8: secrets repeated 2" in page
    assert found["unit"] == "query"
    # Each secret is in two queries, so it has twice the ε of one.
    least = evaluation.least_mean_rank(2 * found["epsilon_certified"], 20)
    assert {entry["least_mean_rank"] for entry in found["canaries"]} == {least}
    assert "is for one query. A secret in 2 queries is 2 of them" in page
    secrets = [canary.secret.encode() for canary in made]
    for path in (directory / "release").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret in content for secret in secrets), path
    # Only what was trained on canaries tells of them.
    trained = json.loads(
        (directory / "private" / "audited_eps8" / "stage.json").read_text()
    )
    assert trained["config"]["pairs"].endswith("private/canaries/data")


def test_every_model_that_saw_private_pairs_unprotected_is_private(finished):
    directory, _, _ = finished
    found = {path.name for path in (directory / "private").iterdir()}
    assert {"generator_inf", "synthetic_inf", "retriever_original"} <= found
    for stage in (directory / "release").iterdir():
        certificate = read_certificate(stage)
        assert certificate is None or math.isfinite(certificate["guarantee"]["epsilon"])


def test_the_synthetic_set_is_whole_and_reads_as_beir(finished):
    directory, _, _ = finished
    path = directory / "release" / "synthetic_eps8" / "set"
    manifest = verify(path)
    rows = list(read_synthetic(path))
    assert manifest["count"] == len(rows) > 0
    beir = BeirDirectory(path / "beir")
    assert len(beir.pairs("train")) == len(rows)
    assert {pair.query_id for pair in beir.pairs("train")} == {
        row.query_id for row in rows
    }


def test_trec_files_and_tensorboard_scalars_are_there(finished):
    directory, _, _ = finished
    run = (directory / "private" / "evaluation" / "runs" / "original.trec").read_text()
    fields = run.splitlines()[0].split()
    assert len(fields) == 6 and fields[1] == "Q0" and fields[3] == "1"
    assert (directory / "private" / "evaluation" / "qrels.trec").is_file()
    events = list(
        (directory / "private" / "logs" / "generator_eps8").glob("*tfevents*")
    )
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events[0]))
        for value in event.summary.value
    }
    assert {"loss", "steps_per_second"} <= tags


def test_the_report_is_one_file_that_fetches_nothing(finished):
    directory, _, queries = finished
    html = (directory / "report.html").read_text()
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "<script" not in html
    assert "Direct DP, ε = 8" in html
    assert "not covered by the guarantee" in html
    # Side by side with held-out private queries, which is why it is internal.
    assert any(query in html for query in queries[60:72])


def test_a_finished_job_is_not_redone(finished):
    directory, config, _ = finished
    before = _tiny_job.stages(directory)
    assert len(before) >= 12
    again = _tiny_job.command(config, directory)
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stderr.count("finished before, not redone") == len(before)
    assert before == _tiny_job.stages(directory)


def test_a_workdir_of_another_config_is_refused(finished):
    directory, config, _ = finished
    done = _tiny_job.command(config, directory, "--config.finetune.clip_norm=0.2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "finetune.clip_norm: 0.1 there, 0.2 now" in last
    assert "another --workdir" in last


def test_changed_pairs_are_noticed(finished, tmp_path):
    """Finished stages were made from other data: refused, not silently mixed."""
    directory, _, _ = finished
    data = directory.parent / "pairs"
    lines = (data / "queries.jsonl").read_text()
    try:
        (data / "queries.jsonl").write_text(lines.replace("who ", "what ", 1))
        with pytest.raises(ValueError, match="from other inputs.*inputs.pairs"):
            pipeline.run(_tiny.tiny_config(data, data.with_name("embedded")), directory)
    finally:
        (data / "queries.jsonl").write_text(lines)


def test_settings_of_rows_that_are_not_made_are_of_no_matter(tmp_path):
    """The notebooks' job has no direct row, and the quickstart's batches for one."""
    _tiny.write_pairs(tmp_path / "pairs")
    config = _tiny.tiny_config(tmp_path / "pairs")
    config.direct.batch_size = 3072
    with pytest.raises(InputError, match="direct.batch_size 3072 is larger than"):
        pipeline.open_job(config, tmp_path / "work")
    config.direct_epsilons = ()
    pipeline.open_job(config, tmp_path / "work")


@pytest.mark.parametrize(
    "change, message",
    [
        (("epsilons", (0.0,)), r"epsilons\[0\] is 0.0"),
        (("direct_epsilons", (-1.0,)), r"direct_epsilons\[0\] is -1.0"),
        (("synthesize.top_p", 0.0), "top_p is 0.0"),
        (("synthesize.top_p", 1.01), "top_p is 1.01"),
        (("finetune.document_length", 0), "finetune.document_length is 0"),
        (("retriever.query_length", -1), "retriever.query_length is -1"),
        (("finetune.batch_size", 61), "batch_size 61 is larger than the data.*60"),
        (("finetune.delta", 1 / 60), "must be below 1/n"),
        (("data", "/nowhere"), "/nowhere"),
        # All that a stage after the first paid one would refuse.
        (("epsilons", (8.0, 301.0)), r"epsilons\[1\] is 301"),
        (("epsilons", (8.0, 8.0000001)), r"epsilons\[1\] .* directory is that of 8.0"),
        (("direct.split", "nope"), "direct.split is 'nope'"),
        (("finetune.n_is_public", False), "in the settings of `finetune`: the number"),
        (("retriever.n_is_public", False), "retriever.n_is_public is False"),
        (("retriever.method", "naive"), "retriever.method is 'naive'"),
        (("retriever.epsilon", 8.0), "retriever.epsilon is 8.0"),
        (("retriever.hard_negatives.run", "/nowhere"), "retriever.hard_negatives.run"),
        (("direct.n_is_public", False), "in the settings of `direct`: the number"),
        (("direct.unit", "user"), "unit is 'user'"),
        (("direct.hard_negatives.run", "/nowhere"), "'public_negatives', but"),
        (("evaluate.k", 1), "Raise k"),
        (("evaluate.split", "nope"), "evaluate.split is 'nope'"),
        (("evaluate.similarity_split", "nope"), "similarity_split is 'nope'"),
        (("evaluate.indexes", {"x": "/nowhere"}), "evaluate.indexes.x"),
        (("evaluate.strict", True), "evaluate.strict is True"),
        (("evaluate.rerank.depth", 500), "rerank.depth is 500, but k is 100"),
        (("evaluate.rerank.base", "retriever_original"), "original, .*synthetic_eps8"),
        (("evaluate.fusion.base", "direct_eps1"), "fusion.base is 'direct_eps1'"),
        (("evaluate.similarity.init", "/nowhere"), "/nowhere"),
        (("audit.strict", True), "audit.strict is True"),
        (("audit.guesses", ((0.9, 0.9),)), "both in and out"),
        (("audit.references", ("/nowhere",)), "/nowhere"),
        (("canaries.split", "dev"), "no canary would be trained on"),
        (("canaries.coins", 10_000), "Lower trials"),
    ],
)
def test_bad_settings_end_before_any_stage(tmp_path, change, message):
    _tiny.write_pairs(tmp_path / "pairs")
    config = _tiny.tiny_config(tmp_path / "pairs")
    *path, last = change[0].split(".")
    target = config
    for name in path:
        target = target[name]
    with config.unlocked():
        target[last] = change[1]
    with pytest.raises(ValueError, match=message):
        pipeline.run(config, tmp_path / "work")
    assert not (tmp_path / "work" / "release").exists()
    if change[0] != "data":  # Corrected, the job takes the same workdir.
        pipeline.open_job(_tiny.tiny_config(tmp_path / "pairs"), tmp_path / "work")


def test_a_public_model_of_another_prompt_reranks_nothing(tmp_path):
    """It was refused after everything was paid, with a remedy that this job lacks."""
    _tiny.write_start(tmp_path)
    trained = {**_tiny.STAGE, "config": {"prompt": "q: "}, "guarantee": "public"}
    (tmp_path / "public" / "stage.json").write_text(json.dumps(trained))
    config, default = _tiny.tiny_config(tmp_path / "pairs"), pipeline.default_config()
    config.init, config.pretrain = str(tmp_path / "public"), default.pretrain
    config.prepare = default.prepare
    for name in ("finetune", "retriever", "direct"):
        config[name].t5 = default[name].t5
    with pytest.raises(ValueError, match="finetune.prompt is .*'q: '.*set rerank to F"):
        pipeline.open_job(config, tmp_path / "work")
    assert not (tmp_path / "work").exists()
    config.rerank = False
    pipeline.open_job(config, tmp_path / "without")
    config.rerank, config.finetune.prompt = True, "q: "
    config.evaluate.rerank.base = "synthetic_eps8"
    pipeline.open_job(config, tmp_path / "with")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        (("finetune.query_length", 5), "more than query_length = 5"),
        (("retriever.rows_at_a_time", 7), "rows_at_a_time is 7, which does not divide"),
        (("retriever.trained", ("nothing",)), "nothing"),
        (("direct.t5.vocabulary_size", 5), "vocabulary"),
    ],
)
def test_what_does_not_fit_the_models_ends_before_any_is_paid_for(
    tmp_path, change, message
):
    _tiny.write_pairs(tmp_path / "pairs")
    config = _tiny.tiny_config(tmp_path / "pairs")
    if change[0] != "finetune.query_length":  # which canaries ask for
        config.pretrain.steps, config.audit_epsilons = 0, ()
    *path, last = change[0].split(".")
    target = config
    for name in path:
        target = target[name]
    target[last] = change[1]
    with pytest.raises(ValueError, match=message):
        pipeline.run(config, tmp_path / "work")
    assert not (tmp_path / "work" / "private" / "runs").exists()


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("qrels/train.tsv", "query-id\tcorpus-id\tscore\nq0\td0\n", r"train.tsv:2"),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\nq0\tzz\t1\n",
            r"test.tsv:2.*zz",
        ),
        ("corpus.jsonl", "", "corpus.jsonl"),
        ("queries.jsonl", '{"_id": "q0", "text": " "}\n', r"queries.jsonl:1"),
        ("queries.jsonl", b'{"_id": "q0", "text": "\xff"}\n', r"queries.jsonl:1"),
        ("qrels/dev.tsv", None, "dev"),
    ],
)
def test_bad_data_is_named_by_file_and_line(tmp_path, file, content, message):
    _tiny.write_pairs(tmp_path / "pairs")
    path = tmp_path / "pairs" / file
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        pipeline.run(_tiny.tiny_config(tmp_path / "pairs"), tmp_path / "work")
    assert not (tmp_path / "work" / "release").exists()


def test_documents_that_bm25_has_no_word_of_cost_nothing(tmp_path):
    """Its row used to refuse them after every generator was paid for."""
    _tiny.write_pairs(tmp_path / "pairs")
    corpus = tmp_path / "pairs" / "corpus.jsonl"
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    for row in rows:
        row.update(title="", text=" ".join(row["title"] + row["text"]))
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="pairs, no document of which has a word of"):
        pipeline.run(_tiny.tiny_config(tmp_path / "pairs"), tmp_path / "work")
    assert not (tmp_path / "work" / "release").exists()


def test_a_weight_that_nothing_can_be_fitted_on_ends_before_training(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs")
    config = _tiny.tiny_config(tmp_path / "pairs")
    config.fit_rerank = True
    rows = [("no such", "d0", "x"), ("no such", "d1", "x")]
    public = _tiny.write_set(tmp_path / "public", rows)
    with pytest.raises(InputError, match="fit_rerank is True, but none of the 2 quer"):
        pipeline_data.check_fit(config, public)
    config.fit_rerank = False
    pipeline_data.check_fit(config, public)


def test_an_unwritable_workdir_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"):
        workdir.open_workdir(tmp_path / "file" / "work", {"a": 1})


def _raw_log(folder):
    """Writes a public T5, and pairs as a log with users; returns private queries."""
    _tiny.write_start(folder)
    beir = BeirDirectory(folder / "pairs")
    pairs = [pair for split in beir.splits() for pair in beir.pairs(split)]
    rows = [
        {"asked": p.query, "clicked": p.document, "who": f"u{number % 40}"}
        for number, p in enumerate(pairs)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {pair.query for pair in pairs}


_LOG_CONFIG = """
import sys

sys.path.insert(0, {here!r})

from helpers import tiny

from tfdpsq.run import pipeline

def get_config():
    config = tiny.tiny_config("{base}/log.jsonl")
    plain = pipeline.default_config()
    config.init = "{base}/public"
    config.update(epsilons=(2.5,), direct_epsilons=(2.5,), audit_epsilons=())
    config.pretrain, config.prepare.vocabulary_size = plain.pretrain, 0
    for name in ("finetune", "retriever", "direct"):
        config[name].t5 = plain[name].t5
    config.finetune.update(unit="user", rows_per_unit=4, microbatch_size=8)
    config.log.columns.update(query="asked", document="clicked", user="who")
    config.log.split_by = "user"
    config.log.log_documents_are_public = True
    return config
"""


def test_a_raw_log_becomes_a_report_in_one_command(tmp_path):
    queries = _raw_log(tmp_path)
    path, work = tmp_path / "config.py", tmp_path / "work"
    here = pathlib.Path(__file__).parents[1]
    path.write_text(_LOG_CONFIG.format(here=str(here), base=tmp_path))
    config = runpy.run_path(str(path))["get_config"]()
    config.log.log_documents_are_public = False
    with pytest.raises(validation.InputError, match="=True if everybody may know"):
        pipeline.run(config, work)
    assert not (work / "private" / "pairs").exists()
    # A mistake that only the pairs show is corrected without importing again.
    config.log.log_documents_are_public = True
    config.retriever.batch_size = 500
    with pytest.raises(validation.InputError, match="batch_size 500 is larger than"):
        pipeline.run(config, work)
    imported = _tiny_job.stages(work)
    assert [*imported] == [work / "private" / "pairs" / "stage.json"]
    done = _tiny_job.command(path, work)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (work / "report.html").is_file()
    assert imported.items() <= _tiny_job.stages(work).items()

    # All later stages are of the imported pairs, under this workdir's key.
    pairs = BeirDirectory(work / "private" / "pairs")
    certificate = read_certificate(work / "release" / "generator_eps2.5")
    assert certificate["fingerprints"]["pairs"] == sources.keyed_fingerprint(
        pairs.fingerprint(), work / "private"
    )
    users = pairs.users("train")
    assert certificate["guarantee"]["unit"] == "user"
    assert certificate["sampler"]["n"] == len(set(users.values())) < len(users)
    assert verify_certificate(certificate).problems == ()
    stage = workdir.read_json(work / "release" / "generator_eps2.5" / "stage.json")
    assert stage["config"]["pairs"] == str(pairs.path)
    assert set(pairs.queries().values()) == queries
    for path in (work / "release").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(query.encode() in content for query in queries), path
    assert all(
        not stat.S_IMODE(p.stat().st_mode) & 0o077 for p in pairs.path.rglob("*")
    )
    assert set(forget.plan(work).delete) >= {pairs.queries_file, pairs.corpus_file}
    assert set(results.open_job(work).pairs["query"]) == queries
    found = status.status(str(work))
    assert found["stages"][0]["name"] == "pairs" and not found["states"]["left"]
    # Names of rows are keys of settings, and hold no dot.
    spent = results.open_job(work).rows["epsilon"]
    for row in ("synthetic_eps2_5", "direct_eps2_5", "reranked_eps2_5"):
        assert 2.3 < spent[row] <= 2.5, row

    # Another config of the import is another config of the workdir.
    config.retriever.batch_size, config.log.seed = 4, 1
    with pytest.raises(
        validation.InputError, match="config.json was written by .*seed"
    ):
        pipeline.run(config, work)
    assert _tiny_job.stages(work)[pairs.path / "stage.json"] in imported.values()
    # What was paid for does not depend on a log that is written on, or deleted.
    config.log.seed, log = 0, pathlib.Path(config.data)
    for change in (lambda: log.write_text("{}"), log.unlink):
        change()
        assert pipeline.open_job(config, work).config.data == str(pairs.path)


def test_a_stage_names_the_command_that_imports_a_log(tmp_path):
    _raw_log(tmp_path)
    sets = tmp_path / "my set"  # as Hugging Face `datasets` writes them
    sets.mkdir()
    (sets / "data-00000-of-00001.arrow").write_bytes(b"")
    (sets / "state.json").write_text("{}")
    for path, quoted in (
        *((f"{tmp_path}/log.jsonl", f"{tmp_path}/log.jsonl"), (str(sets), f"'{sets}'")),
        *((f"{name}:x", f"{name}:x") for name in ("tfds", "ir_datasets")),
    ):
        config = finetune.default_config()
        config.update(pairs=path, vocabulary=f"{tmp_path}/spiece.model")
        with pytest.raises(validation.InputError) as error:
            finetune.run(config, tmp_path / "out")
        assert f"--workdir=private/pairs --config.logs.train={quoted} " in str(
            error.value
        )
        assert not (tmp_path / "out").exists()
    config = _tiny.tiny_config(tmp_path / "pairs")
    config.log.columns.user = "who"
    with pytest.raises(validation.InputError, match="log.columns.user .* not a log"):
        pipeline.run(config, tmp_path / "work")


def test_ir_datasets_reads_a_set_that_was_put_into_its_folder(tmp_path):
    """Without a network: MS MARCO's own files, of two passages."""
    pytest.importorskip("ir_datasets")
    folder = tmp_path / "home" / "msmarco-passage"
    (folder / "train").mkdir(parents=True)
    (folder / "irds_version.txt").write_text("v2")
    (folder / "collection.tsv").write_text("0\tA cup of tea.\n1\tRain falls.\n")
    (folder / "train" / "queries.tsv").write_text("7\twhat is tea\n8\twhat falls\n")
    (folder / "train" / "qrels").write_text("7 0 0 1\n8 0 1 1\n")
    subprocess.run(
        [
            *(sys.executable, "-m", "tfdpsq.run.import"),
            *(f"--workdir={tmp_path}/out", "--config.dev_share=0"),
            *(
                "--config.test_share=0",
                "--config.logs.train=ir_datasets:msmarco-passage/train",
            ),
        ],
        check=True,
        env={**os.environ, "IR_DATASETS_HOME": str(tmp_path / "home")},
    )
    found = [
        (p.query, p.document) for p in BeirDirectory(tmp_path / "out").pairs("train")
    ]
    assert found == [("what is tea", "A cup of tea."), ("what falls", "Rain falls.")]
