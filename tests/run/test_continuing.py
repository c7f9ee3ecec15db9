"""Training goes on from released weights of an earlier log, as users run it."""

import math

import pytest
from helpers import framed, tiny

from tfdpsq.privacy import read_certificate, verify_certificate
from tfdpsq.privacy.proof import budget as budgets
from tfdpsq.privacy.proof.certificate import runs_of
from tfdpsq.run.common.kinds import SET
from tfdpsq.run.frame import runner, settings
from tfdpsq.run.frame.places import Place
from tfdpsq.run.stages import finetune, synthesize, verify
from tfdpsq.validation import InputError


class _Logs:
    """Two logs, a generator of the first, and one that continues it on the second."""

    def __init__(self, base):
        self.base = base
        tiny.write_start(base)
        tiny.write_pairs(base / "february", seed=1)
        self.first = base / "jan" / "release" / "generator"
        self.generator(self.first, "pairs", epsilon=3.0, init=str(base / "public"))
        self.out = base / "feb" / "release" / "generator"
        self.second = self.continued(self.out, "composed")

    def generator(self, out, log="february", **changes):
        small = {"trained": ("*layer_norm*",), "steps": 2}  # a small graph
        usual = tiny.training(self.base, **small)
        made = settings.from_config(
            finetune.STAGE.Settings,
            {**usual, "pairs": str(self.base / log), **changes},
        )
        runner.execute(finetune.STAGE, made, Place.of(out))
        return read_certificate(out)

    def continued(self, out, how, **changes):
        changes = {"epsilon": 2.0, "init": str(self.first), **changes}
        return self.generator(out, continues=how, **changes)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return _Logs(tmp_path_factory.mktemp("logs"))


def test_continuation_states_the_total_of_both_runs(logs):
    """The events of both, by PLD. (Logs apart in time: privacy/test_continuation.)"""
    january = read_certificate(logs.first)
    assert logs.second["earlier"] == [january]
    assert verify_certificate(logs.second).problems == ()
    first, both = (each["accounting"]["epsilon_pld"] for each in (january, logs.second))
    composed = budgets.compose([[*runs_of(january), runs_of(logs.second)[0]]])
    assert both == pytest.approx(composed.epsilon_pld, rel=1e-6)
    assert first < both


def test_verify_counts_the_continued_run_once(logs):
    # The second release alone says what both cost, and the first adds nothing.
    for places in ([logs.out.parent], [logs.out.parent, logs.first.parent]):
        code, said = verify.main(list(map(str, places)))
        total = logs.second["accounting"]["epsilon_pld"]
        assert code == 0 and f"{total:.6g} by PLD" in said


def test_artefacts_made_from_it_carry_the_certificate_of_both(logs):
    out, certificate = logs.out, logs.second
    framed.run(
        synthesize.STAGE,
        out.parent / "synthetic",
        generator=str(out),
        corpus=str(logs.base / "february"),
        max_documents=8,
    )
    made = read_certificate(out.parent / "synthetic" / SET)
    assert made == certificate
    # Weights of the first generator and queries of the second: the guarantee of both.
    mixed = logs.generator(
        logs.base / "mixed" / "release" / "generator",
        epsilon=math.inf,
        init=str(logs.first),
        log=str(out.parent / "synthetic" / SET),
    )
    assert mixed == certificate


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"continues": "time", "init": "t5_tiny_pydocs"}, "no private run is"),
        ({"continues": ""}, "set continues: 'composed' counts all runs together"),
        ({"continues": "time", "epsilon": math.inf}, "epsilon inf. Leave"),
        ({"continues": "time", "unit": "pair"}, "one unit, one sampler"),
    ],
)
def test_impossible_continuations_are_refused_with_the_ledger_unpaid(
    logs, changes, message
):
    out = logs.base / "refused" / "release" / "again"
    changes = {"epsilon": 2.0, "init": str(logs.first), **changes}
    with pytest.raises(InputError, match=message):
        logs.generator(out, **changes)
    assert not out.exists()
    assert not list((logs.base / "refused").rglob("ledger.jsonl"))


def test_same_pairs_are_not_declared_another_log(logs):
    """Recognised by the key in the private directory of the first run."""
    out = logs.first.parent / "again"
    with pytest.raises(InputError, match="do not tell the logs apart"):
        logs.continued(out, "time", log="pairs")
    assert not (logs.base / "jan/private/runs/again/ledger.jsonl").exists()
