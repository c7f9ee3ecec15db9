"""A generator chosen by held-out private queries: its cost, and that it says so."""

import copy
import json
import math

import numpy as np
import pytest
from helpers import tiny_grid as _grid

from tfdpsq import evaluation, validation
from tfdpsq.data import (
    BeirDirectory,
    read_manifest,
    read_synthetic,
)
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.privacy import read_certificate, read_ledger, verify_certificate
from tfdpsq.privacy.proof import choice
from tfdpsq.run import choose, finetune, synthesize, verify
from tfdpsq.run.core import releases
from tfdpsq.run.training import private_training

_config = _grid.config

# Every test needs a grid of trained generators.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return _grid.write(tmp_path_factory.mktemp("choose"))


@pytest.fixture(scope="module")
def accounted(base):
    out = base / "accounted"
    choose.run(_config(base), out)
    return out


@pytest.fixture(scope="module")
def declared(base):
    out = base / "declared"
    config = _config(base, choice="declared", finetune__strict=False)
    choose.run(config, out)
    return out


def _kept(out):
    return out.parent / "private" / choose.CHOICES / out.name


def test_a_private_choice_is_certified_whole(accounted, base):
    certificate = read_certificate(accounted)
    assert verify_certificate(certificate).problems == ()
    found = certificate["selection"]
    assert found["runs_counted"] == found["candidates"] == 2
    assert found["epsilon_of_choice"] == 8.0
    assert certificate["guarantee"]["epsilon"] == 8.0
    assert certificate["guarantee"]["delta"] == 1 / 120
    assert 7.9 < found["epsilon_of_training"] <= 8.0
    assert certificate["private_reads"] == []
    for run in found["runs"].values():
        assert run["steps_executed"] == 3 and run["sampling_probability"] == 1 / 6
        # One of two, it may spend no more than a part.
        assert run["spec"]["epsilon"] < 8.0 and run["spec"]["delta"] == 1 / 240
    assert found["runs"][found["chosen"]]["settings"]["epochs"] == 0.5
    T5QueryGenerator.from_preset(accounted)


def test_each_run_in_the_certificate_is_the_one_its_ledger_paid_for(accounted):
    certificate = read_certificate(accounted)
    ledgers = sorted((accounted.parent / "private" / "runs").glob("accounted-*"))
    assert len(ledgers) == 2
    heads = {run["ledger_head"] for run in certificate["selection"]["runs"].values()}
    assert heads == {read_ledger(path / "ledger.jsonl").head for path in ledgers}
    # Seeds and states are gone.
    assert all([p.name for p in path.iterdir()] for path in ledgers)
    assert not [p for path in ledgers for p in path.rglob("*secret*")]
    words = [f"{path / 'ledger.jsonl'}" for path in ledgers]
    holds, text = verify.verify(str(accounted / "certificate.json"), words)
    assert holds and "with 2 of the 2 ledgers" in text
    assert "for the 6 steps of 2 runs; choosing one of them: epsilon 8.0" in text
    assert "the maker's word: no ledger holds the epsilon of the choice" in text


def test_what_was_chosen_is_what_is_released(accounted):
    chosen = read_certificate(accounted)["selection"]["chosen"]
    point = _kept(accounted) / "points" / f"accounted-{chosen}"
    for variable, other in zip(
        T5QueryGenerator.from_preset(accounted).trainable_variables,
        T5QueryGenerator.from_preset(point).trainable_variables,
    ):
        np.testing.assert_array_equal(variable, other)
    # Nothing that could be released tells of scores, and nothing keeps them.
    assert not (_kept(accounted) / choose.SCORES).exists()
    released = [p.name for p in accounted.rglob("*")]
    assert set(released) == {p.name for p in point.rglob("*")}
    assert releases.stated(accounted) == releases.CERTIFIED
    assert releases.stated(point) == releases.PRIVATE


def test_a_declared_choice_is_the_highest_bleu_and_a_private_read(declared, base):
    certificate = read_certificate(declared)
    assert verify_certificate(certificate).problems == ()
    assert certificate["selection"]["epsilon_of_choice"] is None
    reads = [read["what"] for read in certificate["private_reads"]]
    assert (
        "BLEU of 2 generators against the queries of split 'dev', by which" in reads[1]
    )
    scores = {
        path.stem: json.loads(path.read_text())["bleu"]
        for path in (_kept(declared) / choose.SCORES).iterdir()
    }
    assert len(scores) == 2
    assert scores[certificate["selection"]["chosen"]] == max(scores.values())
    # The scores are those of the set that synthesize writes with the same settings.
    chosen = certificate["selection"]["chosen"]
    config = synthesize.default_config()
    config.generator, config.corpus = str(declared), str(base / "pairs")
    config.document_length, config.query_length = 24, 10
    config.shards = 1
    synthesize.run(config, base / "declared_set")
    manifest = read_manifest(base / "declared_set" / "set")
    assert manifest["certificate"] == certificate
    written = {
        r.document_id: r.query for r in read_synthetic(base / "declared_set/set")
    }
    pairs = BeirDirectory(base / "pairs").pairs("dev")
    bleu = evaluation.corpus_bleu(
        [written.get(p.document_id, "") for p in pairs], [p.query for p in pairs]
    )
    assert scores[chosen] == pytest.approx(bleu.score)


def test_the_chosen_generators_set_carries_a_certificate_that_verifies(
    accounted, base, tmp_path
):
    config = synthesize.default_config()
    config.generator, config.corpus = str(accounted), str(base / "pairs")
    config.document_length, config.query_length = 24, 10
    config.max_documents = 6
    synthesize.run(config, tmp_path / "set")
    path = tmp_path / "set" / "set" / "certificate.json"
    holds, text = verify.verify(str(path), [])
    assert holds and "states      epsilon 8.0" in text
    forged = json.loads(path.read_text())
    del forged["selection"]
    path.write_text(json.dumps(forged))
    assert not verify.verify(str(path), [])[0]


def test_a_finished_choice_is_not_made_again(accounted, base, monkeypatch):
    monkeypatch.setattr(choice, "choose", None)
    before = (accounted / "certificate.json").read_bytes()
    choose.run(_config(base), accounted)
    assert (accounted / "certificate.json").read_bytes() == before


class _KilledError(BaseException):
    pass


def test_a_kill_anywhere_redoes_no_point_and_draws_once(base, tmp_path, monkeypatch):
    trained, drawn, scored, kill = [], [], [], ["training"]
    train, draw, score = finetune._make, choice.choose, evaluation.sentence_bleu

    def counted_train(config, *arguments):
        trained.append(config.learning_rate)
        if kill[0] == "training" and len(trained) == 2:
            raise _KilledError
        return train(config, *arguments)

    def counted_draw(sums, epsilon):
        drawn.append(len(sums))
        if kill[0] == "drawing":
            raise _KilledError
        return draw(sums, epsilon)

    def counted_score(*arguments):
        scored.append(arguments)
        if kill[0] == "scoring" and len(scored) == 12:
            raise _KilledError
        return score(*arguments)

    def certified(*arguments):
        raise _KilledError

    monkeypatch.setattr(finetune, "_make", counted_train)
    monkeypatch.setattr(choice, "choose", counted_draw)
    monkeypatch.setattr(evaluation, "sentence_bleu", counted_score)
    out = tmp_path / "generator"
    config = _config(base)
    for kill[0] in ("training", "scoring", "drawing"):
        with pytest.raises(_KilledError):
            choose.run(config, out)
        assert not out.exists()
    kill[0] = ""
    with monkeypatch.context() as patch:
        patch.setattr(choose.privacy, "make_selection_certificate", certified)
        with pytest.raises(_KilledError):
            choose.run(config, out)
    found = json.loads((_kept(out) / choose.CHOICE_FILE).read_text())
    # Were it drawn again, it would be the other one.
    names = sorted(p.name for p in (_kept(out) / "points").iterdir())
    (other,) = [name for name in names if not name.endswith(found["chosen"])]
    monkeypatch.setattr(choice, "choose", lambda *_: names.index(other))
    choose.run(config, out)
    assert read_certificate(out)["selection"]["chosen"] == found["chosen"]
    # Trained once each, but for the one that was killed; drawn twice, kept once;
    # the second point scored again, of which 3 of 9 queries had been scored.
    assert len(trained) == 3 and len(drawn) == 2 and len(scored) == 9 + 3 + 9


def test_a_point_that_diverged_counts_and_is_not_chosen(base, tmp_path, monkeypatch):
    config = _config(base)
    config.axes = (("learning_rate", (1e-3, 1e3)), ("batch_size", (10,)))
    # No rate that the settings allow diverges within three steps.
    monkeypatch.setattr(
        private_training,
        "learning_rate",
        lambda peak, schedule, steps: 3e38 if peak == 1e3 else peak,
    )
    config.finetune.steps = 3
    out = tmp_path / "generator"
    choose.run(config, out)
    certificate = read_certificate(out)
    assert verify_certificate(certificate).problems == ()
    found = certificate["selection"]
    assert found["runs_counted"] == 2 and found["candidates"] == 1
    assert found["runs"][found["chosen"]]["settings"]["learning_rate"] == 1e-3
    (failed,) = (run for run in found["runs"].values() if run["diverged"])
    assert failed["settings"]["learning_rate"] == 1e3
    assert failed["steps_executed"] == 3 and failed["ledger_head"]
    assert 7.9 < found["epsilon_of_training"] <= 8.0


def test_a_grid_that_was_begun_cannot_be_made_smaller(base, tmp_path, monkeypatch):
    train = finetune._make
    seen = []

    def one_only(*arguments):
        if seen:
            raise _KilledError
        seen.append(1)
        return train(*arguments)

    monkeypatch.setattr(finetune, "_make", one_only)
    config = _config(base)
    config.axes = (("learning_rate", (1e-3, 2e-3, 3e-3)), *config.axes[1:])
    with pytest.raises(_KilledError):
        choose.run(config, tmp_path / "generator")
    smaller = _config(base)
    with pytest.raises(validation.InputError, match="was begun with another config"):
        choose.run(smaller, tmp_path / "generator")


def test_without_privacy_the_best_is_chosen_and_nothing_promised(base, tmp_path):
    config = _config(
        base,
        choice="declared",
        finetune__strict=False,
        finetune__epsilon=math.inf,
    )
    choose.run(config, tmp_path / "generator")
    certificate = read_certificate(tmp_path / "generator")
    assert certificate["private"] is False
    assert verify_certificate(certificate).problems == ()


def test_a_query_added_changes_no_score_but_its_own(base, accounted):
    """What the mechanism's ε rests on: the queries of others are written alike."""
    config = _config(base)
    stage = choose._Choice(config, accounted, accounted.parent / "private", {})
    pairs = BeirDirectory(base / "pairs").pairs("dev")
    chosen = read_certificate(accounted)["selection"]["chosen"]
    every = stage._written(chosen, pairs)
    assert len(every) == 9 and len(set(every.values())) > 1
    for left_out in (0, 4, 8):
        fewer = stage._written(chosen, pairs[:left_out] + pairs[left_out + 1 :])
        assert fewer.items() < every.items() and len(fewer) == 8


def test_forging_the_chosen_generators_certificate_is_found(accounted):
    certificate = read_certificate(accounted)
    forged = copy.deepcopy(certificate)
    name = next(iter(forged["selection"]["runs"]))
    forged["selection"]["runs"][name]["steps_executed"] = 1
    assert verify_certificate(forged).problems
