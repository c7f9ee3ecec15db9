"""A job is refused before its first step where a later one shows that it must be.

`test_job` has what a job makes.
"""

import functools
import json
import operator
import shutil

import pytest
from helpers import tiny

from tfdpsq.data import BeirDirectory
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.run import jobs
from tfdpsq.run.frame import records, runner, settings
from tfdpsq.run.stages.pipeline import STAGE
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
    default = STAGE.config()
    config.update(audit_epsilons=(), histogram_epsilon=0.0)
    config.histogram = default.histogram
    config.init, config.pretrain = str(base / "public"), default.pretrain
    with config.unlocked():
        for name, value in changes.items():
            *path, key = name.split("__")
            functools.reduce(operator.getitem, path, config)[key] = value
    return config


def _plan(config, workdir):
    s = settings.from_config(STAGE.Settings, config)
    return jobs.plan(STAGE.steps(s, workdir), workdir)


def _execute(planned, *names):
    for each in planned:
        if each.step.name in names:
            runner.execute(each.step.stage, each.settings, each.place)


def _run(config, workdir):
    s = settings.from_config(STAGE.Settings, config)
    return jobs.run(STAGE, s, workdir)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"init": ""}, "init is ''"),
        ({"seed": 1, "finetune__seed": 2}, "finetune.seed is 2, which this command"),
        ({"log__seed": 2}, "log is set, but data is"),
        ({"mine__k": 9}, "mine is .* adapter_epsilons"),
        ({"finetune__n_is_public": False}, "finetune.n_is_public"),
        # What later stages refuse.
        ({"synthesize__documents": "train"}, "synthetic_inf: .*training_docum"),
        ({"evaluate__strict": True}, "evaluate.strict is True, which this command"),
        ({"direct__method": "naive", "direct__bidirectional": True}, "bidirectional"),
        ({"direct__unit": "user"}, "direct_eps8: .*unit is 'user'"),
        ({"evaluate__rerank__depth": 500}, "rerank.depth is 500, k 100"),
        ({"rerank": False, "evaluate__rerank__depth": 9}, "rerank is .* rerankers is"),
        ({"evaluate__fusion__base": "direct_eps1"}, "'direct_eps1'"),
        ({"audit_epsilons": (8.0,), "canaries__split": "dev"}, "canaries.split is"),
    ],
)
def test_bad_settings_are_refused_before_any_step(base, tmp_path, changes, match):
    with pytest.raises(InputError, match=match):
        _plan(_config(base, **changes), tmp_path / "work")
    assert not list(tmp_path.rglob("stage.json"))


def test_places_and_classes_follow_from_settings_alone(base, tmp_path):
    planned = _plan(_config(base, "embedded", audit_epsilons=(8.0,)), tmp_path)
    classes = {each.step.name: each.privacy.word for each in planned}
    for name, word in classes.items():
        expected = "certified" if name.endswith(("eps8", "eps0_5")) else "private"
        if name in ("prepare", "retriever_untrained", "retriever_public_only"):
            expected = "public"
        if name.startswith("audit"):  # of canaries
            expected = "private"
        assert word == expected, name
    assert len(classes) == 20 and not list(tmp_path.iterdir())
    # Rows that nothing protects are an option.
    fewer = _plan(_config(base, "embedded", rows="deciding"), tmp_path)
    private = [e.step.name for e in fewer if e.privacy.word == "private"]
    assert private == ["mined", "evaluation"] and len(fewer) == 9


def test_bad_data_are_named_before_the_first_step(base, tmp_path):
    shutil.copytree(base / "pairs", tmp_path / "pairs")
    (tmp_path / "pairs" / "qrels" / "dev.tsv").unlink()
    with pytest.raises(InputError, match="dev.tsv: missing"):
        _run(_config(base, data=str(tmp_path / "pairs")), tmp_path / "w")
    assert not list(tmp_path.rglob("stage.json"))


def test_late_settings_can_be_corrected_and_paid_ones_cannot(base, tmp_path):
    """Lengths and rates of memory may change even in a paid run."""
    s = settings.from_config(STAGE.Settings, _config(base))
    _execute(jobs.plan(STAGE.steps(s, tmp_path), tmp_path), "prepare", "generator_inf")
    for changes in ({"evaluate__k": 50}, {"finetune__microbatch_size": 2}):
        _plan(_config(base, **changes), tmp_path)
    with pytest.raises(InputError, match="generator_inf.*steps.*3.*4"):
        _plan(_config(base, finetune__steps=4), tmp_path)


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
    with pytest.raises(InputError, match="log_documents_are_public=True"):
        _plan(config, work)
    config.log.log_documents_are_public = True
    s = settings.from_config(STAGE.Settings, config)

    # Sizes follow what the import found: documents and users.
    def fit(documents, units):
        raise InputError(f"{documents} and {units}")

    with pytest.raises(InputError, match=f"^{len(set(d.document for d in given))} and"):
        jobs.run(STAGE, s, work, fit=fit)
    planned = jobs.plan(STAGE.steps(s, work), work)
    _execute(planned, "prepare", "generator_eps2.5")

    # All later stages are of the imported pairs, under this workdir's key.
    pairs = BeirDirectory(work / "private" / "pairs")
    assert set(pairs.queries().values()) == {pair.query for pair in given}
    certificate = read_certificate(work / "release" / "generator_eps2.5")
    assert certificate["fingerprints"]["pairs"] == records.keyed_fingerprint(
        pairs.fingerprint(), work / "private"
    )
    users = pairs.users({*pairs.qrels("train")})
    assert certificate["guarantee"]["unit"] == "user"
    assert certificate["sampler"]["n"] == len(set(users.values())) < len(users)
    assert verify_certificate(certificate).problems == ()
    assert 2.3 < certificate["guarantee"]["epsilon"] <= 2.5

    # Another config of the import is another config of the workdir.
    config.log.seed = 1
    with pytest.raises(InputError, match="pairs.*seed"):
        _plan(config, work)
