"""The stage `choose` without a whole grid: what it refuses, reads, scores and draws."""

import json
import math
import pathlib
import runpy

import pytest
import tensorflow as tf
from helpers import tiny_grid as _grid

from tfdpsq import validation
from tfdpsq.data import BeirDirectory
from tfdpsq.privacy.proof import choice
from tfdpsq.privacy.proof.ledger import Ledger
from tfdpsq.run import choose
from tfdpsq.run.core import sources, spending, workdir
from tfdpsq.run.devices import strategy
from tfdpsq.run.training import choice_points

_config = _grid.config
_PRESET = {
    "finetune__init": "t5_tiny_pydocs",
    "finetune__vocabulary": "",
    "finetune__t5": choose.default_config().finetune.t5,
}


class _KilledError(BaseException):
    pass


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return _grid.write(tmp_path_factory.mktemp("choose"))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(choice="best"), "choice is 'best'"),
        (dict(axes=()), "the grid has 1 points, of which 1 are different"),
        (
            dict(axes=(("learning_rate", (1e-3, 1e-3)),)),
            "the grid has 2 points, of which 1 are different",
        ),
        (dict(axes=(("epsilon", (1.0, 2.0)),)), "the grid varies 'epsilon'"),
        (dict(variants={"a": {"n_bound": 5}, "b": {}}), "the grid varies 'n_bound'"),
        (
            dict(variants={"a": {"secure": True}, "b": {}}),
            "the grid varies 'secure'",
        ),
        (dict(variants={"a": {}, "b" * 240: {"steps": 2}}), "of at most 200"),
        (
            {**_PRESET, "variants": {"a": {}, "b": {"continues": "composed"}}},
            "continues is 'composed', but runs to choose among start from public",
        ),
        (
            {**_PRESET, "variants": {"a": {}, "b": {"t5": {"dropout": 0.2}}}},
            "t5.dropout is 0.2, but the T5 in init 't5_tiny_pydocs' has 0.0",
        ),
        (dict(finetune__epsilon=math.inf), "a private choice protects nothing"),
        (dict(choice_epsilon=-1.0), "choice_epsilon is -1.0"),
        (dict(choice="declared", choice_epsilon=1.0), "adds no noise"),
        (dict(choice="declared"), "finetune.strict True, but reading"),
        (dict(held_out="train"), "training pairs cannot choose"),
        (dict(held_out="valid"), "valid"),
        (dict(finetune__unit="user"), "user"),
        (dict(finetune__sampler="shuffled"), "has sampler 'shuffled'"),
        (dict(synthesize__top_p=1.5), "top_p"),
        (dict(finetune__n_is_public=False), "Set n_is_public"),
        (dict(finetune__optimizer="adamw"), "optimizer is 'adamw'"),
        (
            dict(axes=(("batch_size", (10, 100)),), finetune__steps=3),
            "batch_size 100 is larger",
        ),
        (
            dict(finetune__steps=3, axes=(("epochs", (0.5, 1.0)),)),
            "epochs is 0.5 and steps 3",
        ),
        (
            dict(
                axes=(
                    ("trained", (("*",), ("*nothing*",))),
                    ("batch_size", (10,)),
                    ("epochs", (0.5,)),
                )
            ),
            "nothing",
        ),
        (dict(axes=(("epochs", (-1.0, 1.0)),)), "epochs is -1.0"),
    ],
)
def test_what_cannot_be_certified_is_refused_before_anything_is_paid(
    base, tmp_path, changes, message
):
    with pytest.raises(validation.InputError, match=message):
        choose.run(_config(base, **changes), tmp_path / "generator")
    assert not (tmp_path / "generator").exists()
    assert not list((tmp_path / "private").rglob("ledger.jsonl"))


def test_a_point_without_microbatches_for_all_replicas(base, tmp_path, logical_cpus):
    """The points before it would have been paid for."""
    points = {"a": {}, "b": {"microbatch_size": 64}}
    config = _config(base, variants=points, axes=(), finetune__steps=3)
    two = strategy.Devices(tf.distribute.MirroredStrategy(logical_cpus[:2]))
    with pytest.raises(validation.InputError, match="microbatch_size is 64, .* 2 repl"):
        choose.run(config, tmp_path / "generator", two)
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_a_selection_that_cannot_be_certified_is_found_before_payment(
    base, tmp_path, monkeypatch
):
    """A regression: what only the certificate refused, all points had paid for."""
    monkeypatch.setattr(choice_points, "_COMMON", ())
    monkeypatch.setattr(choice_points, "_try", lambda points, specs: None)
    points = {"a": {"secure": True}, "b": {}}
    config = _config(base, variants=points, axes=(), finetune__steps=3)
    with pytest.raises(validation.InputError, match="has secure False, and another"):
        choose.run(config, tmp_path / "chosen")
    assert not list(tmp_path.glob("private/choices/*/plan.json"))
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_no_point_has_pairs_units_or_a_guarantee_of_its_own(base):
    """Points on different splits are not runs on the same units."""
    for field in (
        *("pairs", "split", "epsilon", "delta", "accountant", "sampler", "unit"),
        *("user_field", "rows_per_unit", "n_is_public", "n_bound", "strict"),
        *("secure", "private_directory"),
    ):
        config = _config(base)
        value = config.finetune[field]
        other = value + "x" if isinstance(value, str) else not value
        config.axes = ((field, (value, type(value)(other))),)
        with pytest.raises(validation.InputError, match=f"the grid varies '{field}'"):
            choice_points.check(config)


def test_a_grid_above_the_limit_trains_no_point(base, tmp_path, monkeypatch):
    """All points count, and the draw among them: eight for them, and eight for it."""
    given = []

    def trains(*_):
        raise validation.InputError("a point is trained")

    def require(plans, pairs, choice_epsilon):
        given.append((plans, pairs, choice_epsilon))

    monkeypatch.setattr(choice_points, "_try", lambda *_: None)  # makes no models
    monkeypatch.setattr(choose._Choice, "_train", trains)
    stages = {}
    for mode in choice_points.MODES:
        (tmp_path / mode).mkdir()
        changes = dict(choice=mode, finetune__strict=mode == "accounted")
        stages[mode] = _stage(base, tmp_path / mode, **changes)
        stages[mode]._inputs["pairs"] = "keyed:1"
    with spending.limited(1.0, [], tmp_path / "release" / "next"):
        with pytest.raises(validation.InputError, match="budget is epsilon 1"):
            stages["accounted"].make(tmp_path / "out")
        monkeypatch.setattr(spending, "require_within", require)
        for stage in stages.values():
            with pytest.raises(validation.InputError, match="a point is trained"):
                stage.make(tmp_path / "out")
    assert [pairs for _, pairs, _ in given] == ["keyed:1"] * 2
    assert all(len(plans) == 2 for plans, _, _ in given)
    by_mode = dict(zip(stages, (epsilon for _, _, epsilon in given)))
    assert by_mode == {"accounted": 8.0, "declared": None}


@pytest.mark.parametrize("unit", ["query", "pair"])
def test_a_query_in_both_splits_is_refused(base, tmp_path, monkeypatch, unit):
    def trains(*_):
        raise validation.InputError("a point is trained")

    monkeypatch.setattr(choice_points, "_try", lambda *_: None)  # makes no models
    monkeypatch.setattr(choose._Choice, "_train", trains)
    _grid.tiny.write_pairs(tmp_path / "pairs", train=60, dev=9, test=3)
    qrels = tmp_path / "pairs" / "qrels" / "dev.tsv"
    qrels.write_text(qrels.read_text() + "q5\td5\t1\n")
    pairs = str(tmp_path / "pairs")
    config = _config(base, finetune__pairs=pairs, finetune__unit=unit)
    with pytest.raises(validation.InputError, match="1 queries are in both.*'q5'"):
        choose.run(config, tmp_path / "generator")
    assert not list((tmp_path / "private").rglob("ledger.jsonl"))


def test_the_papers_grid_is_its_table_1():
    path = pathlib.Path(__file__).parents[2] / "configs" / "paper" / "grid.py"
    config = runpy.run_path(str(path))["get_config"]()
    choice_points.check(config)
    points = list(choice_points._points(config))
    assert len(points) == 4 * 4 * 4 * 3
    values = {
        field: sorted({point.settings[field] for point in points})
        for field in ("learning_rate", "clip_norm", "batch_size", "epochs")
    }
    assert values == {
        "learning_rate": [0.000125, 0.00025, 0.0005, 0.001],
        "clip_norm": [0.1, 0.25, 0.5, 1.0],
        "batch_size": [128, 256, 512, 1024],
        "epochs": [10.0, 20.0, 30.0],
    }


def _stage(base, directory, **changes):
    """The stage's inside, with nothing trained."""
    private = directory / "private"
    private.mkdir()
    config = _config(base, **changes)
    stage = choose._Choice(config, directory / "generator", private, {})
    stage._own.mkdir(parents=True)
    return stage


def test_the_read_is_on_record_before_it_happens(base, tmp_path, monkeypatch):
    def interrupted(*_):
        raise _KilledError

    stage = _stage(base, tmp_path, choice="declared", finetune__strict=False)
    monkeypatch.setattr(stage, "_scores", interrupted)
    with pytest.raises(_KilledError):
        stage._choice(["a", "b"], 3, [])
    (line,) = (tmp_path / "private" / "private_reads.jsonl").read_text().splitlines()
    assert "BLEU of 3 generators against the queries of split 'dev'" in line


def test_a_declared_choice_is_the_highest_of_the_scores(base, tmp_path, monkeypatch):
    stage = _stage(base, tmp_path, choice="declared", finetune__strict=False)
    bleu = {"a": 1.0, "b": 3.0, "c": 2.0}
    monkeypatch.setattr(
        stage, "_scores", lambda name, _: {"bleu": bleu[name], "signature": "s"}
    )
    found = stage._choice(["a", "b", "c"], 3, [])
    assert found["chosen"] == "b" and found["epsilon"] is None


def test_the_draw_is_of_sums_of_sentence_scores(base, tmp_path, monkeypatch):
    stage = _stage(base, tmp_path, choice_epsilon=2.5)
    pairs = BeirDirectory(base / "pairs").pairs("dev")
    written = {
        "a": {pair.document_id: pair.query for pair in pairs},
        "b": {pair.document_id: pair.query.split()[0] for pair in pairs},
        "c": {pair.document_id: "" for pair in pairs},
    }
    monkeypatch.setattr(stage, "_written", lambda name, _: written[name])
    seen = []
    monkeypatch.setattr(choice, "choose", lambda *given: seen.append(given) or 1)
    found = stage._choice(["a", "b", "c"], 3, pairs)
    assert found["chosen"] == "b" and found["epsilon"] == 2.5
    ((sums, epsilon),) = seen
    assert epsilon == 2.5
    # Equal texts give 1 each; one word of six a brevity penalty of exp(1 - 6/1).
    assert sums[0] == len(pairs) == 9
    lengths = [len(pair.query.split()) for pair in pairs]
    assert sums[1] == pytest.approx(sum(math.exp(1 - n) for n in lengths), abs=1e-4)
    assert sums[2] == 0.0
    # Kept until the choice is, which a restarted stage then goes on with.
    monkeypatch.setattr(stage, "_written", None)
    assert stage._scores("b", pairs)["sum"] == sums[1]


def test_queries_for_a_private_choice_are_written_on_the_cpu(
    base, tmp_path, monkeypatch, logical_cpus
):
    """Elsewhere a row's rounding may follow from the other rows of its batch.

    So that a held-out query more could change the scores of others, and cost more than
    the choice says. The second CPU stands in for what a GPU would be: the default.
    """
    pairs = BeirDirectory(base / "pairs").pairs("dev")
    found = {}
    for mode in choice_points.MODES:
        (tmp_path / mode).mkdir()
        changes = dict(choice=mode, finetune__strict=mode == "accounted")
        stage = _stage(base, tmp_path / mode, **changes)

        def written(name, held_out, mode=mode):
            found[mode] = tf.Variable(0.0).device
            return {pair.document_id: "a query" for pair in held_out}

        monkeypatch.setattr(stage, "_written", written)
        with tf.device(logical_cpus[1]):
            stage._scores("a", pairs)
    assert found["declared"].endswith("CPU:1")
    assert found["accounted"].endswith("CPU:0")


def test_scores_are_gone_once_the_choice_is_kept(base, tmp_path, monkeypatch):
    stage = _stage(base, tmp_path)
    (stage._own / choose.SCORES).mkdir()
    kept = {"chosen": "a", "epsilon": 8.0, "score": "BLEU"}
    (stage._own / choose.CHOICE_FILE).write_text(json.dumps(kept))
    monkeypatch.setattr(choice, "choose", None)
    assert stage._chosen(["a", "b"], 2, []) == kept
    assert not (stage._own / choose.SCORES).exists()


def test_a_point_of_the_grid_stays_private(base, tmp_path, monkeypatch):
    """A set made from one was released under the ε of one run."""
    run_stage, guarantees = workdir.run_stage, []

    def run(output, *args):
        guarantees.append(output.guarantee)
        if "points" in output.place.parts:
            raise _KilledError
        return run_stage(output, *args)

    monkeypatch.setattr(workdir, "run_stage", run)
    with pytest.raises(_KilledError):
        choose.run(_config(base), tmp_path / "release" / "chosen")
    assert guarantees == ["certified", "private"]


def test_what_is_chosen_on_canaries_is_not_for_release(base, tmp_path, monkeypatch):
    """A generator that knows secrets to be audited, whatever its guarantee."""
    monkeypatch.setattr(choose._Choice, "make", lambda *_: {})  # trains nothing
    made = tmp_path / "private" / "canaries"
    _grid.tiny.write_pairs(made / "data", train=60, dev=9, test=3)
    (made / "canaries.jsonl").write_text("")
    config = _config(base, finetune__pairs=str(made / "data"))
    with pytest.raises(validation.InputError, match="holds canaries .* not be releas"):
        choose.run(config, tmp_path / "release" / "generator")
    assert not (tmp_path / "release").exists()
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_every_draw_has_a_name_of_its_own(base, tmp_path, monkeypatch):
    """Copies of a workdir that each draw are two releases, also of the same run."""
    stage = _stage(base, tmp_path)
    monkeypatch.setattr(stage, "_scores", lambda *_: {"sum": 0.0})
    first, second = (stage._choice(["a"], 1, []) for _ in range(2))
    assert first["chosen"] == second["chosen"] and first["draw"] != second["draw"]


def test_too_little_memory_to_write_queries_is_told_with_its_remedy(
    base, tmp_path, monkeypatch
):
    stage = _stage(base, tmp_path)

    def written(*_):
        raise MemoryError

    monkeypatch.setattr(stage, "_written", written)
    with pytest.raises(validation.InputError, match=r"synthesize\.batch_size .* kept"):
        stage._scores("a", BeirDirectory(base / "pairs").pairs("dev"))


def test_what_was_drawn_once_is_never_drawn_again(base, tmp_path, monkeypatch):
    """A second draw is a second release, which the certificate does not count."""
    stage = _stage(base, tmp_path)
    drawn = iter(("a", "b"))
    monkeypatch.setattr(
        stage,
        "_choice",
        lambda *_: {"chosen": next(drawn), "epsilon": 8.0, "score": "BLEU"},
    )
    first = stage._chosen(["a", "b"], 2, [])
    assert first["chosen"] == "a"
    assert stage._chosen(["a", "b"], 2, []) == first
    assert next(drawn) == "b"


def test_a_grid_that_paid_for_a_step_is_not_begun_again_with_others(
    base, tmp_path, monkeypatch
):
    """Its points have been seen; without them the choice would seem cheaper."""
    monkeypatch.setattr(choice_points, "_try", lambda *_: None)  # makes no models
    config = _config(base)
    source = sources.load_source(config.finetune.pairs, "train")
    own = tmp_path / "choices"
    own.mkdir()

    def run_of(name):
        return tmp_path / "runs" / name

    # How many queries are written at a time follows from the memory there is.
    planned = choice_points.planned(config, source, own, run_of, {"pairs": "f00"})
    run_of(planned[0][0].name).mkdir(parents=True)
    ledger_file = run_of(planned[0][0].name) / "ledger.jsonl"
    with Ledger.open(ledger_file, "plan", "data", 3) as ledger:
        ledger.pay(0)
    smaller = _config(base, synthesize__batch_size=2)
    again = choice_points.planned(smaller, source, own, run_of, {"pairs": "f00"})
    assert [point.name for point in again[0]] == [p.name for p in planned[0]]
    # A version before these settings were there wrote none of them.
    record = own / choice_points.PLAN_FILE
    written = json.loads(record.read_text())
    later = ("noise_window", "clip_per_layer", "histogram", "noiseless_learning_rate")
    for name in later:
        del written["of"]["config"]["finetune"][name]
    record.write_text(json.dumps(written))
    again = choice_points.planned(config, source, own, run_of, {"pairs": "f00"})
    assert [point.name for point in again[0]] == [p.name for p in planned[0]]
    with pytest.raises(validation.InputError, match=r"another config.*clip_per_layer"):
        choice_points.planned(
            _config(base, finetune__clip_per_layer=True),
            source,
            own,
            run_of,
            {"pairs": "f00"},
        )
    # The seed is another matter: scores follow from it.
    reseeded = _config(base, synthesize__seed=7)
    with pytest.raises(validation.InputError, match=r"another config.*seed"):
        choice_points.planned(reseeded, source, own, run_of, {"pairs": "f00"})
    ledger_file.unlink()

    plan = {"of": {"config": "another"}, "points": ["x", "y"], "epsilon": 8.0}
    (own / choice_points.PLAN_FILE).write_text(json.dumps({**plan, "delta": 0.1}))
    run_of("y").mkdir(parents=True)
    with Ledger.open(run_of("y") / "ledger.jsonl", "plan", "data", 3) as ledger:
        ledger.pay(0)
    with pytest.raises(validation.InputError, match="a grid that was begun with anot"):
        choice_points.planned(config, source, own, run_of, {"pairs": "f00"})
    assert json.loads((own / choice_points.PLAN_FILE).read_text())["points"] == [
        "x",
        "y",
    ]


def test_a_grid_that_was_moved_has_the_points_that_it_paid_for(
    base, tmp_path, monkeypatch
):
    monkeypatch.setattr(choice_points, "_try", lambda *_: None)  # makes no models
    (tmp_path / "here").mkdir()

    def planned(place, **changes):
        config = _config(base, finetune__vocabulary=f"{place}/spiece.model", **changes)
        config.variants = {"other": {"seed": 3}, **config.variants.to_dict()}
        source = sources.load_source(config.finetune.pairs, "train")
        (place / "own").mkdir(exist_ok=True)
        found, _ = choice_points.planned(
            config, source, place / "own", lambda name: place / name, {"pairs": "f00"}
        )
        return {point.name: dict(point.settings) for point in found}

    before = planned(tmp_path / "here")
    first = tmp_path / "here" / next(iter(before))
    first.mkdir()
    with Ledger.open(first / "ledger.jsonl", "plan", "data", 3) as ledger:
        ledger.pay(0)
    (tmp_path / "here").rename(tmp_path / "there")
    assert planned(tmp_path / "there") == before
    with pytest.raises(validation.InputError, match="another config.*temperature"):
        planned(tmp_path / "there", synthesize__temperature=0.5)
    plan = tmp_path / "there" / "own" / choice_points.PLAN_FILE
    found = json.loads(plan.read_text())
    plan.write_text(json.dumps({**found, "points": found["points"][1:]}))
    with pytest.raises(validation.DataError, match="points are not those of its conf"):
        planned(tmp_path / "there")
