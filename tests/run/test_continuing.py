"""Training goes on from released weights of an earlier log, as users run it."""

import json
import math
import shutil

import pytest
from helpers import tiny

from tfdpsq.data import train_vocabulary
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.privacy.proof import budget as budgets
from tfdpsq.privacy.proof.certificate import digest_of
from tfdpsq.privacy.proof.certified import plan_of
from tfdpsq.run import (
    budget,
    finetune,
    pipeline,
    synthesize,
    train_retriever,
    verify,
)
from tfdpsq.run.attacks import audit_subject
from tfdpsq.run.core import layout, progress, spending
from tfdpsq.run.reporting.certificates_in_words import in_words
from tfdpsq.validation import InputError


class _Logs:
    """Two logs, a generator of the first, and how to train on the second."""

    def __init__(self, base):
        self.base = base
        queries = tiny.write_pairs(base / "january")
        tiny.write_pairs(base / "february", seed=1)
        train_vocabulary(queries, 320, base / "spiece.model")
        self.config = tiny.tiny_config(str(base / "january"))
        self.config.finetune.accountant = self.config.direct.accountant = "pld"
        self.first = base / "jan" / "release" / "generator"
        self.generator(self.first, "january", epsilon=3.0)

    def _config(self, stage, log, **changes):
        config = self.config[stage].copy_and_resolve_references()
        config.vocabulary = str(self.base / "spiece.model")
        config.update({"pairs": str(self.base / log), **changes})
        return config

    def generator(self, out, log="february", limit=0.0, released=(), **changes):
        with spending.limited(limit, released, out):
            finetune.run(self._config("finetune", log, **changes), out)
        return read_certificate(out)

    def continued(self, out, how, **changes):
        changes = {"epsilon": 2.0, "init": str(self.first), **changes}
        return self.generator(out, continues=how, **changes)

    def retriever(self, out, **changes):
        train_retriever.run(self._config("direct", "february", **changes), out)
        return read_certificate(out)


class _Stopped(Exception):
    pass


def _stopped(logs, out, **config):
    """Stops a run after its second step is paid and saved."""

    def stop(self, step, *_, **__):
        if step >= 2:
            raise _Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress.Progress, "__call__", stop)
        with pytest.raises(_Stopped):
            logs.generator(out, **config)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two logs, the first one released."""
    return _Logs(tmp_path_factory.mktemp("logs"))


def _said(capsys, command, *words):
    with pytest.raises(SystemExit) as caught:
        command.main([command.__name__, *map(str, words)])
    said = capsys.readouterr()
    return caught.value.code, said.out + said.err


def test_a_month_later_the_total_is_stated_verified_and_budgeted(logs, capsys):
    january = read_certificate(logs.first)
    found = {}
    for how in ("time", "composed"):
        out = logs.base / f"feb_{how}" / "release" / "generator"
        found[how] = logs.continued(out, how)
        assert found[how].get("continuation", {}).get("parent") == january
        code, said = _said(capsys, verify, out)
        assert code == 0 and "all 2 runs, of which the last took" in said
        assert ("no query is in two of the logs" in said) == (how == "time")
        code, said = _said(capsys, budget, out.parent)
        assert ("with logs apart as they were declared" in said) == (how == "time")
        assert ("without looking at earlier releases" in said) == (how == "composed")
        # The second release alone says what both cost, and the first adds nothing.
        for places in ([out.parent], [out.parent, logs.first.parent]):
            code, said = _said(capsys, budget, *places, "--json")
            log = json.loads(said)["logs"][0]
            assert (code, log["runs"]) == (0, 2)
            assert log["epsilon"] == pytest.approx(
                found[how]["accounting"]["epsilon_pld"], rel=1e-6
            )
    first, apart, both = (
        each["accounting"]["epsilon_pld"] for each in (january, *found.values())
    )
    assert apart == pytest.approx(first, rel=1e-6)
    composed = budgets.compose(
        {
            "first": budgets.release_of(january),
            "second": budgets.planned_release(
                {"run": plan_of(found["composed"])[0]}, "keyed:other"
            ),
        },
        one_log=True,
    )
    assert both == pytest.approx(composed.epsilon_pld, rel=1e-6)
    assert first < both
    # By name, a log each.
    named = (f"JAN={logs.first.parent}", f"FEB={out.parent}", "--disjoint=time")
    code, said = _said(capsys, budget, *named, "--json")
    assert code == 0 and json.loads(said)["together"]["epsilon"] == pytest.approx(first)


def test_what_is_made_from_it_carries_the_certificate_of_both(logs):
    out = logs.base / "mar" / "release" / "generator"
    certificate = logs.continued(out, "user")
    config = logs.config.synthesize.copy_and_resolve_references()
    config.update(
        vocabulary=str(logs.base / "spiece.model"),
        generator=str(out),
        corpus=str(logs.base / "february"),
        max_documents=8,
    )
    synthesize.run(config, out.parent / "synthetic")
    made = read_certificate(out.parent / "synthetic" / layout.SET)
    assert made == certificate and verify_certificate(made).problems == ()
    # Weights of the first generator and queries of the second: the guarantee of both.
    mixed = logs.generator(
        logs.base / "mixed" / "release" / "generator",
        epsilon=math.inf,
        init=str(logs.first),
        log=out.parent / "synthetic" / layout.SET,
    )
    assert mixed == certificate


def test_a_retriever_goes_on_from_a_generator_s_encoder(logs):
    out = logs.base / "direct" / "release" / "retriever"
    changes = {"init": str(logs.first), "epsilon": 2.0}
    with pytest.raises(InputError, match="continues: 'composed' counts all runs"):
        logs.retriever(out, **changes)
    certificate = logs.retriever(out, continues="composed", **changes)
    assert certificate["continuation"]["runs_counted"] == 2
    assert certificate["guarantee"]["epsilon"] > 3.0
    assert verify_certificate(certificate).problems == ()
    with pytest.raises(InputError, match="continues"):
        logs.retriever(out, continues="time", method="plain", epsilon=math.inf)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"continues": "weekly", "init": ""}, "continues is 'weekly'; choose one of"),
        ({"continues": "time", "init": ""}, "continues"),
        ({"continues": "time", "init": "t5_tiny_pydocs"}, "has no certificate"),
        ({"continues": ""}, "set continues: 'composed' counts all runs together"),
        ({"continues": "time", "epsilon": math.inf}, "nothing would be guaranteed"),
        ({"continues": "time", "unit": "pair"}, "the same unit and sampler"),
        (
            {"continues": "time", "log": "january", "private": True},
            "on these very pairs",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_before_payment(logs, changes, message):
    out = logs.base / "refused" / "release" / "again"
    if math.isinf(changes.get("epsilon", 2.0)):
        out = logs.base / "refused" / "private" / "again"
    changes = {"epsilon": 2.0, "init": str(logs.first), **changes}
    private = logs.base / "refused" / "private"
    if changes.pop("private", False):  # that of the first log, with its key
        private = logs.first.parent.parent / "private"
        changes["private_directory"] = str(private)
    if changes["init"] == "t5_tiny_pydocs":
        changes["vocabulary"] = ""
    with pytest.raises(InputError, match=message):
        logs.generator(out, **changes)
    assert not out.exists()
    assert not (private / "runs" / "again" / "ledger.jsonl").exists()


def test_a_limit_counts_what_is_continued(logs):
    out = logs.base / "limited" / "release" / "generator"
    limited = {"limit": 3.0, "released": (str(logs.first),)}
    with pytest.raises(InputError, match="the budget is epsilon 3, of which 1"):
        logs.continued(out, "composed", **limited)
    # Also where only its own certificate tells of the first log.
    with pytest.raises(InputError, match="the budget is epsilon 3, of which 1"):
        logs.continued(out, "composed", limit=3.0)
    assert not out.exists()
    assert logs.continued(out, "time", **limited)["guarantee"]["epsilon"] <= 3.0


def test_a_refused_retriever_reads_nothing_private(logs):
    out = logs.base / "unread" / "release" / "retriever"
    with spending.limited(3.0, (), out):
        with pytest.raises(InputError, match="the budget is epsilon 3, of which 1"):
            changes = {"init": str(logs.first), "epsilon": 2.0}
            logs.retriever(out, continues="composed", **changes)
    assert not (logs.base / "unread" / "private" / "private_reads.jsonl").exists()


def test_a_remedy_that_would_be_refused_is_not_given(logs):
    out = logs.base / "remedy" / "private" / "retriever"
    changes = {"init": str(logs.first), "epsilon": math.inf}
    with pytest.raises(InputError, match="Start from public weights.$"):
        logs.retriever(out, method="naive", **changes)


def test_ledgers_of_all_runs_are_compared(logs, capsys):
    """Each with the run that states its head; the rest is said to be left."""
    out = logs.base / "kept" / "release" / "generator"
    logs.continued(out, "composed")
    ledgers = [
        f"--ledger={where.parents[1] / 'private' / 'runs' / 'generator'}/ledger.jsonl"
        for where in (logs.first, out)
    ]
    for given, said in (
        (ledgers[1:], "and with 1 of the 2 ledgers"),
        (ledgers, "and with 2 of the 2 ledgers"),
    ):
        code, out_ = _said(capsys, verify, out, *given)
        assert code == 0 and said in out_


def test_a_card_tells_the_reads_and_limits_of_every_run(logs):
    out = logs.base / "card" / "release" / "generator"
    certificate = logs.continued(out, "time", strict=True)
    card = in_words([{"name": "", "certificate": certificate}])["cards"][0]
    reads = card["particulars"]["Private reads that ε does not cover"]
    assert any("Of the runs before this one: the training loss" in r for r in reads)
    assert "the target of the last run was" in card["particulars"]["ε and δ"]
    assert "post-processing" in card["particulars"]["Continued from released weights"]


def test_canaries_are_put_where_they_can_be_certified(logs, monkeypatch):
    """A run on canaries is refused before its first step, too."""
    monkeypatch.setattr(finetune.canary_set, "holds_canaries", lambda *_: True)
    monkeypatch.setattr(finetune.canary_set, "require_private_output", lambda *_: None)
    out = logs.base / "canaries" / "private" / "generator"
    with pytest.raises(InputError, match="the same unit and sampler"):
        logs.continued(out, "time", unit="pair")
    runs = logs.base / "canaries" / "private" / "runs"
    assert not list(runs.rglob("ledger.jsonl"))


@pytest.mark.parametrize("stage", ["finetune", "retriever", "direct"])
def test_a_job_starts_from_public_weights(logs, stage):
    """Found before the job's first stage, not after it has paid for generators."""
    config = logs.config.copy_and_resolve_references()
    config[stage].continues = "time"
    with pytest.raises(InputError, match=f"{stage}.continues is 'time', which"):
        pipeline.require_acting(config)


def test_an_audit_compares_with_the_run_that_had_the_canaries(logs):
    out = logs.base / "audited" / "release" / "generator"
    certificate = logs.continued(out, "time")
    claimed = audit_subject.guarantee_of(str(out))
    own = certificate["continuation"]["epsilon_of_this_run"]
    assert claimed["epsilon"] == own < certificate["guarantee"]["epsilon"]


def test_a_run_begun_before_there_was_this_setting_goes_on(logs):
    """An older record lacks the setting, and at its default it changes nothing."""
    out = logs.base / "older" / "release" / "generator"
    config = {"steps": 4, "save_every": 1, "epsilon": 2.0}
    _stopped(logs, out, **config)
    path = logs.base / "older" / "private" / "runs" / "generator" / "run.json"
    record = json.loads(path.read_text())
    assert record["config"].pop("continues") == ""
    path.write_text(json.dumps(record))
    assert logs.generator(out, **config)["accounting"]["steps_executed"] == 4
    with pytest.raises(InputError, match="steps"):
        logs.generator(out, **{**config, "steps": 5})


def test_a_parent_whose_digest_was_made_anew_is_refused_before_spending(logs):
    """Four paid steps declared as one would make room under a limit."""
    forged = logs.base / "forged" / "release" / "generator"
    shutil.copytree(logs.first, forged)
    certificate = read_certificate(forged)
    true = certificate["digest"]
    certificate["accounting"]["steps_executed"] = 1
    certificate["digest"] = digest_of(certificate)
    (forged / "certificate.json").write_text(json.dumps(certificate))
    # Model and stage name their certificate, too.
    for path in (*forged.rglob("config.json"), forged / "stage.json"):
        path.write_text(path.read_text().replace(true, certificate["digest"]))
    out = logs.base / "on_forged" / "release" / "generator"
    with pytest.raises(InputError, match="does not hold"):
        logs.continued(out, "composed", init=str(forged))
    assert not list((logs.base / "on_forged").rglob("ledger.jsonl"))
