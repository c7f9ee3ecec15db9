"""A job ends before its first paid step where one of its later stages would refuse.

`test_job` has what a job makes.
"""

import functools
import json
import operator
import shutil

import pytest
from helpers import tiny, tiny_job

from tfdpsq.data import BeirDirectory
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.privacy.proof import ledger
from tfdpsq.run import pipeline
from tfdpsq.run.core import pipeline_data, sources
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, a public T5 of their vocabulary, and embeddings of all texts."""
    directory = tmp_path_factory.mktemp("pairs")
    tiny.write_start(directory)
    tiny.write_embedded(directory / "embedded")
    return directory


def _config(base, embedded="", **changes):
    config = tiny.tiny_config(base / "pairs", embedded and base / embedded)
    config.update(audit_epsilons=(), histogram_epsilon=0.0)
    default = pipeline.default_config()
    config.histogram.clusters = default.histogram.clusters
    config.init, config.pretrain = str(base / "public"), default.pretrain
    config.prepare.vocabulary_size = 0
    for name in ("finetune", "retriever", "direct"):
        config[name].t5 = default[name].t5  # the weights decide
    with config.unlocked():
        for name, value in changes.items():
            *path, key = name.split("__")
            functools.reduce(operator.getitem, path, config)[key] = value
    return config


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"epsilons": (8.0, 301.0)}, r"epsilons\[1\] is 301"),
        ({"data": "/nowhere"}, "/nowhere"),
        # Sizes and splits of the data.
        ({"finetune__batch_size": 61}, "finetune.batch_size 61 .*60"),
        ({"retriever__split": "dev", "retriever__batch_size": 16}, "'dev' .* 12 pairs"),
        ({"finetune__delta": 1 / 60}, "finetune.delta .* below 1/n"),
        ({"histogram_epsilon": 0.4, "histogram__clusters": 85}, "clusters .* 84 doc"),
        ({"synthesize__max_documents": 2}, "at most 2 queries"),
        ({"synthesize__documents": "train"}, "synthesize.training_docum"),
        # What no epsilon covers, or the number of units that is private.
        ({"finetune__n_is_public": False}, "`finetune`: the number"),
        ({"evaluate__strict": True}, "evaluate.strict is True"),
        # Methods, models and rows of later stages.
        ({"direct__method": "naive", "direct__bidirectional": True}, "bidirectional"),
        ({"direct__unit": "user"}, "unit is 'user'"),
        ({"evaluate__rerank__depth": 500}, "rerank.depth is 500, but k is 100"),
        ({"evaluate__fusion__base": "direct_eps1"}, "'direct_eps1'"),
        (
            {"finetune__accountant": "pld", "finetune__delta": 1e-16},
            "`finetune`: delta",
        ),
        ({"embedded": "embedded", "adapter__split": "nope"}, "adapter.split is 'nope'"),
        # Audits.
        ({"audit_epsilons": (8.0,), "audit__top": 20}, "top is 20"),
        ({"audit_epsilons": (8.0,), "canaries__coins": 10_000}, "Lower trials"),
    ],
)
def test_bad_settings_are_refused_before_any_stage(base, tmp_path, changes, match):
    with pytest.raises(InputError, match=match):
        pipeline.open_job(_config(base, **changes), tmp_path / "work")
    assert not (tmp_path / "work").exists()
    settings = {n: v for n, v in changes.items() if n == "embedded"}
    pipeline.open_job(_config(base, **settings), tmp_path / "work")


_FEW_CANARIES = {
    "audit_epsilons": (8.0,),
    "canaries__most_pairs": 5,
    "audit__members": 2,
    "finetune__batch_size": 4,
}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"finetune__trained": ("zzz",)}, "`finetune`: trained holds 'zzz'"),
        ({"retriever__rows_at_a_time": 7}, "rows_at_a_time is 7"),
        (
            {"direct__method": "public_negatives", "direct__negatives": 8}
            | {"direct__hard_negatives__run": "/nope"},
            "`direct`: hard_negatives.run is /nope",
        ),
        ({"finetune__batch_size": 32}, "`finetune`: batch_size 32 is larger"),
        ({"finetune__query_length": 8}, "`finetune`: .* query_length"),
    ],
)
def test_what_shows_only_with_models_leaves_the_ledger_unpaid(base, changes, match):
    """In one workdir: a setting that no stage has used can be corrected there."""
    config = _config(base, **{**_FEW_CANARIES, **changes})
    with pytest.raises(InputError, match=match):
        pipeline.run(config, base / "work")
    assert not list((base / "work").rglob(ledger.FILE_NAME))


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("qrels/train.tsv", "query-id\tcorpus-id\tscore\nq0\td0\n", r"train.tsv:2"),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\nq0\tzz\t1\n",
            r"test.tsv:2: its document is not in",
        ),
        ("queries.jsonl", '{"_id": "q0", "text": " "}\n', r"queries.jsonl:1"),
        ("corpus.jsonl", '{"_id": "d0", "text": "a b c"}\n', "train.tsv:3"),
        ("qrels/dev.tsv", None, "dev"),
    ],
)
def test_bad_data_are_named_by_file_and_line(base, tmp_path, file, content, match):
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    path = tmp_path / "pairs" / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(InputError, match=match):
        pipeline.open_job(_config(base, data=str(tmp_path / "pairs")), tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_public_pairs_that_do_not_fit_end_before_training(base, tmp_path):
    rows = [("no such", "d0", "x"), ("no such", "d1", "x")]
    public = tiny.write_set(tmp_path / "public", rows)
    config = _config(base, fit_rerank=True)
    with pytest.raises(InputError, match="fit_rerank is True"):
        pipeline_data.check_fit(config, public)
    config.fit_rerank = False
    with pytest.raises(InputError, match="retriever.batch_size is 4, but 2 public"):
        pipeline_data.check_prepared(config, public, "", tmp_path)


# -- Corrected -----------------------------------------------------------------------


def test_what_no_stage_has_used_can_be_corrected(base, tmp_path):
    """A job that a late stage refuses goes on, and pays nothing again."""
    work = tmp_path / "work"
    pipeline.open_job(_config(base), work)
    runs = work / "private" / "runs"
    for name in ("generator_eps8", "retriever_direct_eps8"):
        (runs / name).mkdir(parents=True)
    # Of these, one is unpaid.
    (runs / "generator_eps8" / ledger.FILE_NAME).write_text("of a paid step, say\n")
    for changes in (
        {"evaluate__k": 50},
        {"synthesize__top_k": 3},
        {"direct__clip_norm": 2.0},
    ):
        pipeline.open_job(_config(base, **changes), work)
    pipeline.open_job(_config(base), work)
    written = (work / "config.json").read_text()
    for changes in ({"finetune__steps": 4}, {"epsilons": (3.0,)}, {"seed": 6}):
        with pytest.raises(InputError, match="another config .*Set it back to go on"):
            pipeline.open_job(_config(base, **changes), work)
    assert (work / "config.json").read_text() == written


# -- From a log ----------------------------------------------------------------------


def test_raw_log_becomes_pairs_and_a_generator_of_a_job(base, tmp_path):
    beir = BeirDirectory(base / "pairs")
    given = [pair for split in beir.splits() for pair in beir.pairs(split)]
    rows = [
        {"asked": p.query, "clicked": p.document, "who": f"u{number % 40}"}
        for number, p in enumerate(given)
    ]
    log, work = tmp_path / "log.jsonl", tmp_path / "work"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = _config(base, data=str(log), epsilons=(2.5,))
    config.finetune.update(unit="user", rows_per_unit=4, microbatch_size=8, steps=1)
    config.log.columns.update(query="asked", document="clicked", user="who")
    config.log.split_by = "user"
    with pytest.raises(InputError, match="=True if everybody may know"):
        pipeline.run(config, work)
    assert not (work / "private" / "pairs").exists()
    # A mistake that only the pairs show is corrected without importing again.
    config.log.log_documents_are_public = True
    config.retriever.batch_size = 500
    with pytest.raises(InputError, match="batch_size 500 is larger than"):
        pipeline.run(config, work)
    imported = tiny_job.stages(work)
    assert [*imported] == [work / "private" / "pairs" / "stage.json"]
    config.retriever.batch_size = 4
    job = pipeline.open_job(config, work)
    job.prepare()
    job.generators()
    assert imported.items() <= tiny_job.stages(work).items()

    # All later stages are of the imported pairs, under this workdir's key.
    pairs = BeirDirectory(work / "private" / "pairs")
    assert set(pairs.queries().values()) == {pair.query for pair in given}
    certificate = read_certificate(work / "release" / "generator_eps2.5")
    assert certificate["fingerprints"]["pairs"] == sources.keyed_fingerprint(
        pairs.fingerprint(), work / "private"
    )
    users = pairs.users("train")
    assert certificate["guarantee"]["unit"] == "user"
    assert certificate["sampler"]["n"] == len(set(users.values())) < len(users)
    assert verify_certificate(certificate).problems == ()
    assert 2.3 < certificate["guarantee"]["epsilon"] <= 2.5

    # Another config of the import is another config of the workdir.
    config.log.seed = 1
    with pytest.raises(InputError, match="another config.*seed"):
        pipeline.run(config, work)
    # What was paid for does not depend on a log that is written on, or deleted.
    config.log.seed = 0
    for change in (lambda: log.write_text("{}"), log.unlink):
        change()
        assert pipeline.open_job(config, work).config.data == str(pairs.path)
