"""Training goes on from released weights of an earlier log, as users run it."""

import json
import math

import pytest
import tiny

from tfdpsq.data import train_vocabulary
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.privacy.proof import budget as budgets
from tfdpsq.privacy.proof.certified import plan_of
from tfdpsq.run import budget, finetune, synthesize, train_retriever, verify
from tfdpsq.run.core import layout, spending
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
        assert found[how]["continuation"]["parent"] == january
        code, said = _said(capsys, verify, out)
        assert code == 0 and "all 2 runs, of which the last took" in said
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
    with pytest.raises(InputError, match="the budget is epsilon 3, of which 0"):
        logs.continued(out, "composed", limit=3.0)
    assert not out.exists()
    assert logs.continued(out, "time", **limited)["guarantee"]["epsilon"] <= 3.0
