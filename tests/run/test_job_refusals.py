"""A job ends before its first paid step where one of its later stages would refuse."""

import contextlib
import contextvars
import dataclasses
import functools
import json
import operator
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny

from tfdpsq.privacy.proof import ledger
from tfdpsq.run import canaries, evaluate, finetune, histogram, pipeline
from tfdpsq.run.core import (
    layout,
    pipeline_checks,
    pipeline_data,
    sources,
    used_parts,
    workdir,
)
from tfdpsq.run.devices import strategy
from tfdpsq.run.passes import given_embeddings
from tfdpsq.run.passes.document_rates import Histogram
from tfdpsq.run.search import adapted
from tfdpsq.validation import DataError, InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("job")
    tiny.write_pairs(directory / "pairs")
    tiny.write_embedded(directory / "embedded")
    return directory


def _config(base, embedded="", **changes):
    config = tiny.tiny_config(base / "pairs", embedded and base / embedded)
    config.update(audit_epsilons=(), histogram_epsilon=0.0)
    config.histogram.clusters = pipeline.default_config().histogram.clusters
    for name, value in changes.items():
        *path, key = name.split("__")
        functools.reduce(operator.getitem, path, config)[key] = value
    return config


def _refused(base, work, match, embedded="", error=InputError, **changes):
    config = _config(base, embedded, **changes)
    with pytest.raises(error, match=match):
        pipeline.open_job(config, work)
    assert not work.exists()


def test_sizes_are_compared_before_the_first_stage(base, tmp_path):
    refused = functools.partial(_refused, base, tmp_path / "work")
    refused(
        "histogram.clusters is 85, but .* has 84 documents",
        histogram_epsilon=0.4,
        histogram__clusters=85,
    )
    refused(
        "retriever.batch_size is 4, but a synthetic set has at most 2 queries",
        synthesize__max_documents=2,
    )
    tiny.write_pairs(tmp_path / "few", train=5, dev=5, test=5)
    refused(
        "^evaluate.index is 'scann', but 15 documents .* Set it to 'scann_brute_forc",
        data=str(tmp_path / "few"),
        evaluate__index="scann",
    )
    pipeline.open_job(_config(base, evaluate__index="scann"), tmp_path / "tree")
    fewer = {"synthesize__max_documents": 2, "epsilons": ()}
    pipeline.open_job(_config(base, **fewer), tmp_path / "no_set")


def test_each_split_is_compared_with_what_it_has(base, tmp_path):
    refused = functools.partial(_refused, base, tmp_path / "work")
    refused(
        "retriever.batch_size 16 is larger than the data: split 'dev' .* has 12 pairs",
        retriever__split="dev",
        retriever__batch_size=16,
    )
    small = {"finetune__split": "dev", "finetune__batch_size": 4}
    config = _config(base, **small, finetune__delta=0.05)  # below 1/12, above 1/60
    pipeline.open_job(config, tmp_path / "dev")


def test_documents_of_the_pairs_are_declared_and_counted(base, tmp_path):
    train = {"synthesize__documents": "train"}
    refused = functools.partial(_refused, base, tmp_path / "work")
    refused(
        "^synthesize.documents is 'train', .*Set synthesize.training_docum", **train
    )
    train["synthesize__training_documents_are_public"] = True
    refused("^synthesize.split is 'nope'", **train, synthesize__split="nope")
    refused(
        "at most 12 queries, .*the 12 documents of",
        **train,
        synthesize__split="dev",
        retriever__batch_size=16,
    )
    pipeline.open_job(_config(base, **train), tmp_path / "train")


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"method": "public_negatives", "negatives": 200},
            "^direct.negatives is 200, .*",
        ),
        (
            {"method": "public_negatives", "negatives": 9, "most_documents": 8},
            "drawn from 8 documents",
        ),
        ({"method": "logit_dp", "bidirectional": True}, "bidirectional is True, for"),
        ({"method": "naive", "bidirectional": True}, "bidirectional is True, for"),
        ({"method": "logit_dp", "learned_scale": True}, "learned_scale is True, for"),
        ({"method": "logit_dp", "engine": "vectorized"}, "engine is 'vectorized', whi"),
    ],
)
def test_what_a_direct_method_is_not_derived_for(base, tmp_path, changes, match):
    changes = {f"direct__{name}": value for name, value in changes.items()}
    _refused(base, tmp_path / "work", match, direct_epsilons=(8.0,), **changes)


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"finetune__microbatch_size": 64},
            "of `finetune`: microbatch_size is 64, .* 2 r",
        ),
        (
            {"retriever__batch_size": 15},
            "of `retriever`: batch_size is 15, which 2 repl",
        ),
        (
            {
                "direct__method": "public_negatives",
                "direct__negatives": 8,
                "direct__microbatch_size": 64,
            },
            "of `direct`: microbatch_size is 64, .* 2 replicas",
        ),
        (
            {
                "direct__method": "microbatch",
                "direct__batch_size": 16,
                "direct__microbatch_size": 64,
            },
            "of `direct`: microbatch_size is .* 2 replicas",
        ),
        ({"direct__method": "naive", "direct__microbatch_size": 64}, None),
        ({"direct__method": "logit_dp", "direct__microbatch_size": 64}, None),
    ],
)
def test_every_replica_has_a_microbatch(base, tmp_path, logical_cpus, changes, match):
    config = _config(base, direct_epsilons=(8.0,), **changes)
    two = strategy.Devices(tf.distribute.MirroredStrategy(logical_cpus[:2]))
    refused = pytest.raises(InputError, match=match)
    with refused if match else contextlib.nullcontext():
        pipeline.open_job(config, tmp_path / "work", two)
    assert (tmp_path / "work").exists() == (not match)
    pipeline.open_job(config, tmp_path / "one")  # on one device nothing is wrong


def _unpaid(config, work, match, devices=strategy.DEFAULT):
    """Runs a job that is refused when its canaries are made, before all that costs."""
    config.audit_epsilons = (8.0,)
    with pytest.raises(InputError, match=match):
        pipeline.run(config, work, devices)
    assert not list(work.rglob(ledger.FILE_NAME))


def test_audits_of_two_replicas(base, tmp_path, logical_cpus):
    config = _config(base, epsilons=(), finetune__microbatch_size=64)
    two = strategy.Devices(tf.distribute.MirroredStrategy(logical_cpus[:2]))
    _unpaid(config, tmp_path / "work", "of `finetune`: microbatch_size is 64", two)


def test_audits_fit_the_pairs_with_canaries(base, tmp_path):
    """Batches, bounds and users are compared with the canaries that were made."""
    five = {"canaries__most_pairs": 5}
    config = _config(base, **five, finetune__batch_size=32)
    _unpaid(config, tmp_path / "a", "of `finetune`: batch_size 32 is larger than")
    config = _config(base, epsilons=(), finetune__n_is_public=False)
    config.finetune.n_bound = 61
    _unpaid(config, tmp_path / "b", "n_bound is 61, but the data hold more")
    # As many users as pairs that are kept, and one for all rows of a canary.
    config = _config(base, **five, canaries__repetitions=(30,), epsilons=())
    config.canaries.coins, config.audit.guesses = 0, ((0.2, 0.2),)
    config.finetune.update(unit="user", batch_size=16, microbatch_size=16)
    shutil.copytree(base / "pairs", tmp_path / "of_users")
    config.data = str(tmp_path / "of_users")
    path = tmp_path / "of_users" / "queries.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    given = ({**line, "metadata": {"user_id": line["_id"]}} for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    _unpaid(config, tmp_path / "c", "of `finetune`: batch_size 16 is larger than")


def test_canaries_are_made_before_all_that_costs(base, tmp_path):
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    path = tmp_path / "pairs" / "queries.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[::2]:
        line["metadata"] = {"user_id": "a"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = _config(base)
    config.data = str(tmp_path / "pairs")
    _unpaid(config, tmp_path / "a", "user_id', which some queries .* or none")
    config = _config(base, finetune__query_length=8, synthesize__query_length=8)
    _unpaid(config, tmp_path / "b", "of `finetune`: .* query_length")


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"audit__top": 20}, "top is 20, but a canary's secret has 20 candidates"),
        ({"audit__confidence": 0.5}, r"audit.confidence is 0.5; .* \(0.5, 1\)"),
        (
            {"audit__guesses": ((0.02, 0.98),)},
            r"guesses holds \(0.02, 0.98\), which are \(1, 24\) of the 24 canaries",
        ),
        ({"audit__guesses": ((0.0, 1.0),)}, r"\(1, 24\) of the 24 canaries"),
    ],
)
def test_what_cannot_be_asked_of_canaries(base, tmp_path, changes, match):
    _refused(base, tmp_path / "work", match, audit_epsilons=(8.0,), **changes)


def test_plans_are_made_before_adapters_are_paid(base, tmp_path):
    """A delta that only the accountant refuses."""
    match = "of `finetune`: delta is 1e-16, too small for accountant 'pld'"
    small = {"finetune__accountant": "pld", "finetune__delta": 1e-16}
    _refused(base, tmp_path / "work", match, "embedded", **small)


def test_a_missing_generator_of_secure_draws_is_told_first(base, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    match = "of `direct`: secure is True, but its cryptographic generator is not inst"
    _refused(base, tmp_path / "work", match, direct__secure=True)


def test_what_no_stage_has_used_can_be_corrected(base, tmp_path):
    """A job that a late stage refuses goes on, and pays nothing again."""
    work = tmp_path / "work"
    pipeline.open_job(_config(base), work)
    (work / "release" / "generator_eps8").mkdir(parents=True)
    paid = work / "private" / "runs" / "generator_eps8"
    paid.mkdir(parents=True)
    (paid / ledger.FILE_NAME).write_text("a line of a paid step, say\n")
    (work / "release" / ".public_model.state").mkdir()  # unfinished
    direct = work / "private" / "runs" / "retriever_direct_eps8"
    direct.mkdir()  # unpaid
    for changes in (
        {"audit__top": 5},
        {"evaluate__k": 50},
        {"canaries__trials": 2},
        {"synthesize__top_k": 3},
        {"direct__clip_norm": 2.0},
    ):
        pipeline.open_job(_config(base, **changes), work)
    pipeline.open_job(_config(base), work)
    (direct / ledger.FILE_NAME).write_text("a line of a paid step, say\n")
    written = (work / workdir.CONFIG_FILE).read_text()
    for changes in (
        {"finetune__steps": 4},
        {"pretrain__steps": 9},
        {"direct__clip_norm": 2.0},
        {"examples": 1},
        {"epsilons": (3.0,)},
        {"seed": 6},
    ):
        with pytest.raises(InputError, match="another config .*Set it back to go on"):
            pipeline.open_job(_config(base, **changes), work)
    assert (work / workdir.CONFIG_FILE).read_text() == written
    (work / "private" / "evaluation").mkdir()
    used = "evaluate.k: 100 there, 50 now.* private/evaluation cost no budget, by"
    with pytest.raises(InputError, match=used):
        pipeline.open_job(_config(base, evaluate__k=50), work)


def test_audits_compare_queries_that_are_kept(base, tmp_path):
    config = _config(base, epsilons=(), canaries__most_pairs=1)
    config.finetune.update(batch_size=2, microbatch_size=2)
    _unpaid(config, tmp_path / "a", "of `audit`: there are 1 training queries")
    config = _config(base, epsilons=(), audit__other_splits=("nope",))
    _unpaid(config, tmp_path / "c", "of `audit`: there are .* 0 in splits")
    none = {"canaries": canaries.default_config(), "audit_epsilons": (8.0,)}
    none["canaries"].trials = 0
    _refused(base, tmp_path / "b", "^canaries.trials and canaries.coins are 0", **none)


def test_references_of_an_audit_read_the_same_words(base, tmp_path):
    tiny.write_start(tmp_path)
    config = _config(base, audit__references=(str(tmp_path),), audit_epsilons=(8.0,))
    with pytest.raises(InputError, match="of `audit`: .* holds no T5 checkpoint"):
        pipeline_checks.check_settings(config)
    config = _config(base, audit__references=("t5_tiny_pydocs",))
    config.audit_epsilons = (8.0,)
    rows = (("a query", f"d{n}", "x") for n in range(9))
    public = tiny.write_set(tmp_path / "public_set", rows)
    with pytest.raises(
        InputError, match=r"^audit.references\[0\] is t5_tiny_pydocs, wh"
    ):
        pipeline_data.check_prepared(
            config,
            public,
            str(tmp_path / "spiece.model"),
            tmp_path,
        )


@pytest.mark.parametrize("stage", ["finetune", "histogram", "adapter"])
def test_microbatches_hold_whole_users(base, tmp_path, stage):
    changes = {f"{stage}__rows_per_unit": 3, f"{stage}__microbatch_size": 4}
    if stage == "adapter":
        changes.update(adapter__unit="user", adapter__user_field="user_id")
    else:
        changes.update(finetune__unit="user", finetune__user_field="user_id")
        changes.update(histogram_epsilon=0.4, histogram__clusters=8)
    match = rf"^{stage}.microbatch_size is 4, which parts the 3 rows .*{stage}.rows_per"
    _refused(base, tmp_path / "work", match, "embedded", **changes)


def test_places_and_names_are_checked_before_the_first_stage(base, tmp_path):
    refused = functools.partial(_refused, base, tmp_path / "work")
    refused("^adapter.split is 'nope'", "embedded", adapter__split="nope")
    refused(
        "^similarity.vocabulary is '/nope': /nope",
        evaluate__similarity__featurizer="t5",
        evaluate__similarity__init="t5_tiny_pydocs",
        evaluate__similarity__vocabulary="/nope",
    )
    refused("^retriever.unit is 'user'", retriever__unit="user")
    refused(
        "^similarity.init is '/nope', which is neither a directory nor a GPT-2",
        evaluate__similarity__featurizer="gpt2",
        evaluate__similarity__init="/nope",
    )
    (tmp_path / "empty").mkdir()
    refused(
        "^similarity.init is .*empty', which has no metadata.json: it is no keras-nlp",
        evaluate__similarity__featurizer="gpt2",
        evaluate__similarity__init=str(tmp_path / "empty"),
    )
    tiny.write_start(tmp_path / "t5")
    refused(
        "similarity.vocabulary is .* pieces",
        evaluate__similarity__init=str(tmp_path / "t5" / "public"),
        evaluate__similarity__vocabulary=str(
            sources.vocabulary_file("", "t5_tiny_pydocs")
        ),
    )
    for stage in ("finetune", "histogram", "adapter", "evaluate"):
        refused(
            f"^{stage}.private_directory is '/x', .*this job fills it in",
            "embedded",
            histogram_epsilon=0.4,
            **{f"{stage}__private_directory": "/x"},
        )


def test_weights_are_fitted_where_the_base_needs_no_embedding(base, tmp_path):
    options = {"rerank": True, "fit_rerank": True, "evaluate__rerank__base": "encoder"}
    _refused(
        base,
        tmp_path / "work",
        "^fit_rerank is True and evaluate.rerank.b",
        "embedded",
        **options,
    )
    config = evaluate.default_config()
    config.systems = {"bm25": "bm25", "encoder": "embeddings"}
    config.query_embeddings = {"encoder": "x"}
    config.rerank.fit = "set"
    adapted.check(config)
    config.rerank.base = "encoder"
    with pytest.raises(InputError, match="rerank.fit is 'set', and query_embeddings"):
        adapted.check(config)


def test_every_encoder_is_declared(base, tmp_path):
    """The report says of it that it saw no private pair."""
    changes = {"adapter_epsilons": (), "adapter": pipeline.default_config().adapter}
    _refused(base, tmp_path / "work", "Set encoder_is_public", "embedded", **changes)
    config = _config(base, "embedded", **changes, mine=pipeline.default_config().mine)
    config.adapter.encoder_is_public = True
    pipeline.open_job(config, tmp_path / "work")


def test_rows_of_a_user_are_set_for_a_histogram(base):
    config = _config(base, histogram_epsilon=0.4, histogram__rows_per_unit=3)
    with pytest.raises(InputError, match="^histogram.rows_per_unit is 3, .*nothing"):
        pipeline.require_acting(config)
    config.finetune.unit = "user"
    pipeline.require_acting(config)


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"finetune__trained": ("zzz",)},
            "of `finetune`: trained holds 'zzz', which matches no trainable weight",
        ),
        (
            {
                "direct__method": "public_negatives",
                "direct__hard_negatives__run": "/nope",
                "direct__negatives": 8,
            },
            "of `direct`: hard_negatives.run is /nope, where there is no file",
        ),
    ],
)
def test_ends_before_adapters_are_paid(base, tmp_path, changes, match):
    with pytest.raises(InputError, match=match):
        pipeline.run(_config(base, "embedded", **changes), tmp_path / "work")
    assert not list((tmp_path / "work").rglob(ledger.FILE_NAME))


def test_a_run_of_other_pairs_is_refused_before_all(base, tmp_path):
    """The key of a job's fingerprints is its own, so no earlier run was mined by it."""
    run = tmp_path / "run.trec"
    run.write_text("q0 Q0 d1 1 1.0 x\n")
    found = {"by": {"name": "bm25"}, "pairs": "another", "split": "train", "run": ""}
    (tmp_path / "mining.json").write_text(json.dumps(found))
    config = _config(base, direct__hard_negatives__run=str(run))
    rows = (("a query", f"d{n}", "x") for n in range(9))
    public = tiny.write_set(tmp_path / "public", rows)
    check = functools.partial(
        pipeline_data.check_prepared, config, public, "", tmp_path
    )
    with pytest.raises(InputError, match="of `direct`: .*is not the run that"):
        check()
    config.direct_epsilons = ()
    check()
    config.retriever.batch_size = 10
    with pytest.raises(InputError, match="^retriever.batch_size is 10, but 9 public"):
        check()


def test_embeddings_of_zeros_are_refused(base, tmp_path):
    documents, queries = tiny.vectors()
    for kind, vectors in (("documents", documents), ("queries", 0 * queries)):
        ids = [f"{kind[0]}{number}" for number in range(len(vectors))]
        tiny.write_embeddings(tmp_path, kind, vectors, ids)
    with pytest.raises(InputError, match="^queries is .*embeddings are all zeros"):
        given_embeddings.open_both(str(tmp_path), str(tmp_path), True)


def test_an_adapter_with_nan_is_damaged(base, tmp_path):
    np.save(tmp_path / layout.ADAPTER_FILE, np.full([8, 8], np.nan, np.float32))
    documents = given_embeddings.Embeddings.open(
        "indexes.a", str(base / "embedded"), "documents"
    )
    with pytest.raises(DataError, match="holds NaN or infinity. Train the adapter"):
        adapted._matrix("a", str(tmp_path), documents)


def test_an_adapter_is_no_retriever(base, tmp_path):
    np.save(tmp_path / layout.ADAPTER_FILE, np.eye(8, dtype=np.float32))
    (tmp_path / "stage.json").write_text(json.dumps(tiny.STAGE))
    config = evaluate.default_config()
    config.systems, config.data = {"a": str(tmp_path)}, str(base / "pairs")
    with pytest.raises(InputError, match="Set query_embeddings.a and indexes.a"):
        evaluate.run(config, tmp_path / "evaluation")


def test_a_system_is_not_its_own_baseline(tmp_path):
    config = evaluate.default_config()
    config.systems, config.baselines = {"bm25": "bm25"}, {"bm25": "bm25"}
    with pytest.raises(InputError, match="baselines.bm25 is 'bm25': a system is not"):
        evaluate.run(config, tmp_path / "evaluation")


def test_no_generator_is_paid_for_a_histogram_that_is_none(tmp_path, monkeypatch):
    """`synthesize` alone refused it, after the generator."""
    tiny.write_start(tmp_path)
    release = tmp_path / "release"
    config = histogram.default_config()
    config.update(pairs=str(tmp_path / "pairs"), clusters=8, epsilon=5.0)
    config.n_is_public = True
    histogram.run(config, release / "histogram")
    config = finetune.default_config()
    config.update(tiny.training(tmp_path, steps=2, microbatch_size=4, epsilon=8.0))
    config.histogram = str(release / "histogram")
    useless = Histogram.load(config.histogram)
    useless = dataclasses.replace(useless, counts=(-1.0,) * 8)
    with monkeypatch.context() as patch, pytest.raises(InputError, match="is above 0"):
        patch.setattr(Histogram, "load", lambda path: useless)
        finetune.run(config, release / "generator")
    (release / "histogram" / "histogram.json").unlink()
    with pytest.raises(InputError, match="holds no histogram.json"):
        finetune.run(config, release / "generator")
    runs = tmp_path / "private" / "runs"
    assert {path.parent.name for path in runs.rglob(ledger.FILE_NAME)} <= {"histogram"}


@pytest.mark.parametrize("place", ["release/generator_eps8", "private/evaluation"])
def test_an_output_without_a_job_is_refused_before_all(base, tmp_path, place):
    (tmp_path / place).mkdir(parents=True)
    with pytest.raises(InputError, match=f"{place} exists, but no job has begun in"):
        pipeline.open_job(_config(base), tmp_path)
    assert not (tmp_path / workdir.CONFIG_FILE).exists()


def test_an_import_that_was_killed_is_begun_again(base, tmp_path):
    (tmp_path / "private" / ".pairs.0123456789ab.partial").mkdir(parents=True)
    pipeline.open_job(_config(base), tmp_path)


def test_what_cost_no_budget_can_be_made_again(base, tmp_path):
    """All that is in the way is named, and whether it was paid for."""
    work = tmp_path / "work"
    pipeline.open_job(_config(base), work)
    for name, epsilon in (("inf", "inf"), ("eps8", 8.0)):
        run = work / "private" / "runs" / f"generator_{name}"
        run.mkdir(parents=True)
        (run / ledger.FILE_NAME).write_text("a line of a paid step, say\n")
        (run / "run.json").write_text(json.dumps({"config": {"epsilon": epsilon}}))
    (work / "private" / "generator_inf").mkdir()
    other = _config(base, finetune__steps=4)
    with pytest.raises(
        InputError, match="now.. private/runs/generator_eps8 paid a bud"
    ):
        pipeline.open_job(other, work)
    shutil.rmtree(work / "private" / "runs" / "generator_eps8")
    both = "private/generator_inf, private/runs/generator_inf cost no budget, by"
    with pytest.raises(InputError, match=both):
        pipeline.open_job(other, work)
    shutil.rmtree(work / "private" / "generator_inf")
    shutil.rmtree(work / "private" / "runs")
    pipeline.open_job(other, work)


def test_what_a_histogram_has_of_the_generators_settings_stays(base, tmp_path):
    """They may change in all else until a generator is trained."""
    made = dict(histogram_epsilon=0.4, finetune__epsilon=8.0)
    pipeline.open_job(_config(base, **made), tmp_path)
    run = tmp_path / "private" / "runs" / "histogram_eps0.4"
    run.mkdir(parents=True)
    (run / ledger.FILE_NAME).write_text("a line of a paid step, say\n")
    (run / "run.json").write_text(json.dumps({"config": {"epsilon": 0.4}}))
    bound = dict(finetune__n_is_public=False, finetune__n_bound=100)
    message = "finetune.n_bound: .*private/runs/histogram_eps0.4 paid a budget with it"
    with pytest.raises(InputError, match=message):
        pipeline.open_job(_config(base, **made, **bound), tmp_path)
    pipeline.open_job(_config(base, **made, finetune__steps=4), tmp_path)


def test_an_output_without_its_ledger_cost_what_it_certifies(tmp_path):
    """A set made of another output, whose ledger is here, did not."""
    certificate = {"guarantee": {"epsilon": 8.0}, "ledger_head": "h"}
    for name in ("generator_eps8", "synthetic_eps8"):
        made = tmp_path / "release" / name
        made.mkdir(parents=True)
        (made / "certificate.json").write_text(json.dumps(certificate))
    used = {"finetune": [tmp_path / "release" / "generator_eps8"]}
    changed = ["finetune.steps: 3 there, 4 now"]
    said = used_parts.remedy(used, changed, tmp_path)
    assert said.startswith("release/generator_eps8 paid a budget with it. Set it back")
    used = {"synthesize": [tmp_path / "release" / "synthetic_eps8"]}
    changed = ["synthesize.top_k: 0 there, 4 now"]
    run = tmp_path / "private" / "runs" / "generator_eps8"
    run.mkdir(parents=True)
    with ledger.Ledger.open(run / ledger.FILE_NAME, "plan", "data", 3) as opened:
        opened.pay(0)
        certificate["ledger_head"] = opened.head
    (made / "certificate.json").write_text(json.dumps(certificate))
    said = used_parts.remedy(used, changed, tmp_path)
    assert said.startswith("release/synthetic_eps8 cost no budget, by the ledgers here")
    said = used_parts.remedy(used, [*changed, "data: 'a' there, 'b' now"], tmp_path)
    assert "Set it back" in said and "move" not in said


def test_one_job_at_a_time_is_in_a_workdir(base, tmp_path):
    """Its config may not be replaced while it is about to pay."""
    work = tmp_path / "work"
    with workdir.alone():
        pipeline.open_job(_config(base), work)
        other = contextvars.Context()  # as in another process
        with pytest.raises(InputError, match="is in use by another job. Wait"):
            other.run(workdir.alone()(pipeline.open_job), _config(base), work)
        pipeline.open_job(_config(base), work)
    pipeline.open_job(_config(base, finetune__steps=4), work)
