"""A generator chosen by held-out private queries: its cost is certified."""

import pytest
from helpers import tiny

from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.privacy import read_certificate, read_ledger, verify_certificate
from tfdpsq.run import choose
from tfdpsq.run.core import releases
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Two points of 3 steps, on 60 pairs in batches of 10."""
    base = tmp_path_factory.mktemp("choose")
    tiny.write_pairs(base / "pairs", train=60, dev=9, test=3)
    texts = (d.content for d in BeirDirectory(base / "pairs").documents())
    train_vocabulary(texts, 320, base / "spiece.model")
    made = choose.default_config()
    made.finetune.update(
        pairs=str(base / "pairs"),
        strict=True,
        vocabulary=str(base / "spiece.model"),
        document_length=24,
        query_length=10,
        epsilon=8.0,
        n_is_public=True,
        accountant="rdp",
        batch_size=10,
        steps=3,
        microbatch_size=10,
    )
    made.finetune.t5.update(tiny.SHAPE, vocabulary_size=320)
    made.axes = (("learning_rate", (1e-3, 3e-2)),)
    return made


@pytest.mark.slow
def test_choice_is_certified_with_all_runs_and_the_draw(config, tmp_path):
    out = tmp_path / "release" / "generator"
    choose.run(config, out)
    certificate = read_certificate(out)
    assert verify_certificate(certificate).problems == ()
    found = certificate["selection"]
    assert found["runs_counted"] == found["candidates"] == 2
    assert found["epsilon_of_choice"] == certificate["guarantee"]["epsilon"] == 8.0
    assert 7.9 < found["epsilon_of_training"] <= 8.0
    assert certificate["private_reads"] == []
    ledgers = (tmp_path / "private" / "runs").glob("generator-*/ledger.jsonl")
    heads = {run["ledger_head"] for run in found["runs"].values()}
    assert heads == {read_ledger(path).head for path in ledgers}
    # Scores are gone, and the points stay private.
    kept = tmp_path / "private" / choose.CHOICES / "generator"
    assert not (kept / choose.SCORES).exists()
    for point in (kept / "points").iterdir():
        assert releases.stated(point) == releases.PRIVATE


def test_what_cannot_be_certified_is_refused_with_the_ledger_unpaid(config, tmp_path):
    for changes, message in (
        ({"axes": (("epsilon", (1.0, 2.0)),)}, "the grid varies 'epsilon'"),
        ({"held_out": "train"}, "training pairs cannot choose"),
        ({"choice": "declared", "choice_epsilon": 0.0}, "strict True"),
    ):
        changed = config.copy_and_resolve_references()
        changed.update(changes)
        with pytest.raises(InputError, match=message):
            choose.run(changed, tmp_path / "generator")
    assert not list(tmp_path.rglob("ledger.jsonl"))
