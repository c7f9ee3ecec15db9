"""Training goes on from released weights of an earlier log, as users run it."""

import math

import pytest
from helpers import tiny

from tfdpsq.data import train_vocabulary
from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.privacy.proof import budget as budgets
from tfdpsq.privacy.proof.certificate import runs_of
from tfdpsq.run import finetune, pipeline, synthesize, train_retriever, verify
from tfdpsq.run.attacks import audit_subject
from tfdpsq.run.core import layout, spending
from tfdpsq.validation import InputError


class _Logs:
    """Two logs, a generator of the first, and two that continue it on the second."""

    def __init__(self, base):
        self.base = base
        queries = tiny.write_pairs(base / "january")
        tiny.write_pairs(base / "february", seed=1)
        train_vocabulary(queries, 320, base / "spiece.model")
        self.config = tiny.tiny_config(str(base / "january"))
        self.config.finetune.trained = ("*layer_norm*",)  # a small graph
        self.first = base / "jan" / "release" / "generator"
        self.generator(self.first, "january", epsilon=3.0)
        self.out = {
            how: base / f"feb_{how}" / "release" / "generator"
            for how in ("time", "composed")
        }
        self.second = {how: self.continued(self.out[how], how) for how in self.out}

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
    return _Logs(tmp_path_factory.mktemp("logs"))


def _said(capsys, command, *words):
    with pytest.raises(SystemExit) as caught:
        command.main([command.__name__, *map(str, words)])
    said = capsys.readouterr()
    return caught.value.code, said.out + said.err


def test_continuation_states_the_total_of_both_runs(logs):
    """Apart in time: the larger of both. Composed: the events of both, by PLD."""
    january = read_certificate(logs.first)
    for certificate in logs.second.values():
        assert certificate["earlier"] == [january]
        assert verify_certificate(certificate).problems == ()
    first, apart, both = (
        each["accounting"]["epsilon_pld"] for each in (january, *logs.second.values())
    )
    assert apart == pytest.approx(first, rel=1e-6)
    second = runs_of(logs.second["composed"])[0]
    composed = budgets.compose([[*runs_of(january), second]])
    assert both == pytest.approx(composed.epsilon_pld, rel=1e-6)
    assert first < both


def test_commands_count_the_continued_run_once(logs, capsys):
    for how, certificate in logs.second.items():
        out = logs.out[how]
        # The second release alone says what both cost, and the first adds nothing.
        for places in ([out.parent], [out.parent, logs.first.parent]):
            code, said = _said(capsys, verify, *places)
            total = certificate["accounting"]["epsilon_pld"]
            assert code == 0 and f"{total:.6g} by PLD" in said
            assert len(places) == 1 or "log 1, 2 runs" in said
    # Each run's ledger is compared.
    ledgers = [
        f"--ledger={where.parents[1] / 'private' / 'runs' / 'generator'}/ledger.jsonl"
        for where in (logs.first, out)
    ]
    code, said = _said(capsys, verify, out, *ledgers)
    assert code == 0 and "with 2 of its 2 ledgers" in said
    # The second release holds the first's run, so they are not of disjoint logs.
    named = (f"JAN={logs.first.parent}", f"FEB={out.parent}", "--disjoint=time")
    code, said = _said(capsys, verify, *named)
    assert code == 1 and "one run is in two of them" in said


def test_artefacts_made_from_it_carry_the_certificate_of_both(logs):
    out, certificate = logs.out["composed"], logs.second["composed"]
    config = logs.config.synthesize.copy_and_resolve_references()
    config.update(
        generator=str(out),
        corpus=str(logs.base / "february"),
        max_documents=8,
    )
    synthesize.run(config, out.parent / "synthetic")
    made = read_certificate(out.parent / "synthetic" / layout.SET)
    assert made == certificate
    # Weights of the first generator and queries of the second: the guarantee of both.
    mixed = logs.generator(
        logs.base / "mixed" / "release" / "generator",
        epsilon=math.inf,
        init=str(logs.first),
        log=out.parent / "synthetic" / layout.SET,
    )
    assert mixed == certificate


def test_retriever_continues_a_generators_encoder(logs):
    out = logs.base / "direct" / "release" / "retriever"
    changes = {"init": str(logs.first), "epsilon": 2.0}
    with pytest.raises(InputError, match="continues: 'composed' counts all runs"):
        logs.retriever(out, **changes)
    certificate = logs.retriever(out, continues="composed", **changes)
    assert certificate["continuation"]["runs_counted"] == 2
    assert certificate["guarantee"]["epsilon"] > 3.0
    assert verify_certificate(certificate).problems == ()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"continues": "time", "init": "t5_tiny_pydocs"}, "has no certificate"),
        ({"continues": ""}, "set continues: 'composed' counts all runs together"),
        ({"continues": "time", "epsilon": math.inf}, "nothing would be guaranteed"),
        ({"continues": "time", "unit": "pair"}, "one unit, one sampler"),
    ],
)
def test_impossible_continuations_are_refused_with_the_ledger_unpaid(
    logs, changes, message
):
    folder = "private" if math.isinf(changes.get("epsilon", 2.0)) else "release"
    out = logs.base / "refused" / folder / "again"
    changes = {"epsilon": 2.0, "init": str(logs.first), **changes}
    if changes["init"] == "t5_tiny_pydocs":
        changes["vocabulary"] = ""
    with pytest.raises(InputError, match=message):
        logs.generator(out, **changes)
    assert not out.exists()
    assert not list((logs.base / "refused").rglob("ledger.jsonl"))


def test_same_pairs_are_not_declared_another_log(logs):
    """Recognised by the key in the private directory of the first run."""
    private = logs.first.parent.parent / "private"
    out = logs.base / "twice" / "release" / "again"
    changes = {"log": "january", "private_directory": str(private)}
    with pytest.raises(InputError, match="do not tell the logs apart"):
        logs.continued(out, "time", **changes)
    assert not (private / "runs" / "again" / "ledger.jsonl").exists()


def test_limit_counts_the_continued_run(logs):
    out = logs.base / "limited" / "release" / "generator"
    # Only the certificate of `init` tells of the first log.
    limit = 0.99 * logs.second["composed"]["accounting"]["epsilon_pld"]
    with pytest.raises(InputError, match="the budget is epsilon"):
        logs.continued(out, "composed", limit=limit)
    assert not out.exists()


def test_audit_compares_with_the_run_that_had_the_canaries(logs):
    claimed = audit_subject.guarantee_of(str(logs.out["composed"]))
    own = logs.second["composed"]["continuation"]["epsilon_of_this_run"]
    total = logs.second["composed"]["guarantee"]["epsilon"]
    assert claimed["epsilon"] == own < total


def test_job_starts_from_public_weights(logs):
    """Found before the job's first stage, not after it has paid for generators."""
    config = logs.config.copy_and_resolve_references()
    config.finetune.continues = "time"
    with pytest.raises(InputError, match="finetune.continues is 'time'"):
        pipeline.require_acting(config)
