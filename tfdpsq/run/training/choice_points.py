"""The points of a grid on private pairs: checked, and planned to share one budget.

All checks precede the first paid step: a grid that has begun cannot be changed, since
the cost of its points counts from then on.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_collections
import tensorflow as tf

from tfdpsq import privacy, validation
from tfdpsq.data import Tokenizer, atomic_write
from tfdpsq.privacy.proof import ledger, selection
from tfdpsq.run.core import layout, sources, workdir
from tfdpsq.run.training import private_training, starting_model
from tfdpsq.run.training.grid_points import Point, points_of

MODES = ("declared", "accounted")
PLAN_FILE = layout.PLAN_FILE
# What it must hold: points that were paid for are read from it.
_PLAN = {
    "of": dict,
    "points": list,
    "epsilon": (int, float, str),
    "delta": (int, float),
}
# Settings that all points have in common, or share.
_COMMON = (
    "pairs split epsilon delta accountant sampler unit user_field rows_per_unit "
    "n_is_public n_bound strict secure private_directory"
).split()
# Settings of the generator; points that differ elsewhere start from the same one.
_MODEL = "init t5 vocabulary lora soft_prompt trained dtype rematerialize".split()


def check(
    config: ml_collections.ConfigDict,
) -> list[tuple[str, ml_collections.ConfigDict]]:
    """Refuses settings that no guarantee could be given for.

    Returns:
      Name and config of every point, as `finetune` takes it.
    """
    shared, points = config.finetune, list(_points(config))
    if len({point.name for point in points}) < max(len(points), 2):
        raise validation.InputError(
            f"the grid has {len(points)} points, of which "
            f"{len({point.name for point in points})} are different; there must be at "
            "least two, and none twice. Correct variants and axes, or use finetune."
        )
    for point in points:
        for field in point.settings:
            if field in _COMMON:
                raise validation.InputError(
                    f"the grid varies {field!r}, which all points must have in "
                    f"common. Set finetune.{field}."
                )
    declared = config.choice == "declared"
    if not declared and not math.isfinite(float(shared.epsilon)):
        raise validation.InputError(
            f"choice is 'accounted' and finetune.epsilon {shared.epsilon}: if "
            "generators are unprotected, a private choice protects nothing. Set "
            "finetune.epsilon to a finite number, or choice to 'declared'."
        )
    if declared and config.choice_epsilon:
        raise validation.InputError(
            f"choice_epsilon is {config.choice_epsilon}, but choice 'declared' adds no "
            "noise. Set choice_epsilon to 0, or choice to 'accounted'."
        )
    if declared and shared.strict:
        raise validation.InputError(
            "choice is 'declared' and finetune.strict True, but reading the held-out "
            "queries is covered by no epsilon. Set choice to 'accounted', or strict to "
            "False."
        )
    if config.held_out == shared.split:
        raise validation.InputError(
            f"held_out and finetune.split are both {config.held_out!r}: training pairs "
            "cannot choose. Name two splits."
        )
    if sources.is_free(shared.pairs):
        raise validation.InputError(
            f"{shared.pairs} is a synthetic or public set, where choosing costs "
            "nothing. Give private pairs, or use the stage grid."
        )
    return [(each.name, each.stage.copy_and_resolve_references()) for each in points]


def planned(
    config: ml_collections.ConfigDict,
    train: sources.Source,
    own: pathlib.Path,
    run_of: Callable[[str], pathlib.Path],
    inputs: Mapping[str, str],
    replicas: int = 1,
) -> tuple[list[Point], float]:
    """Returns the points with their budgets, which the first call writes down.

    `train` are the training pairs of all points, `own` is the directory of the grid's
    records, `run_of` maps a point's name to the directory of its ledger; `replicas`
    share each batch.

    Returns:
      The points, and δ of all of them together.

    Raises:
      InputError: a point that cannot run; or a grid of other settings or data was
        begun and paid for here.
    """
    units = private_training.units_of(
        train, config.finetune.unit, config.finetune.user_field
    )
    points = list(_points(config))
    n = private_training.spec_of(
        config.finetune, units, steps=1, batch_size=1
    ).num_units
    for point in points:
        found = private_training.with_steps(point.stage, n)
        point.stage.steps, point.stage.epochs = found.steps, found.epochs
    specs = [private_training.spec_of(point.stage, units) for point in points]
    for spec in specs:
        for problem in selection.requirements(spec):
            raise validation.InputError(f"finetune {problem}.")
    delta = specs[0].target_delta
    path = own / PLAN_FILE
    wanted = {"config": workdir.plain(config), "inputs": dict(inputs)}
    found = workdir.read_json(path, **_PLAN) if path.is_file() else None
    if found is not None:
        changed = workdir.differences(
            _paid_for(found["of"]), _paid_for(_as_recorded(wanted, found["of"])), own
        )
        if changed and any(_paid(run_of(name)) for name in found["points"]):
            raise validation.InputError(
                f"{own} holds a grid that was begun with another config or other data "
                f"({'; '.join(changed)}). Go on with the same, or use another "
                "--workdir: a new grid spends a budget of its own, and both add up."
            )
        found = None if changed else found
    if found is None:
        if specs[0].private:
            total = float(config.finetune.epsilon)
            specs = privacy.share_epsilon(specs, total, delta)
        for point, spec in zip(points, specs):
            private_training.require_microbatches(point.stage, spec, replicas)
        _try(points, specs)
        if specs[0].private:
            _require_certifiable(config, points, specs, delta)
        found = {
            "of": {**wanted, **workdir.written_in(own)},
            "points": [point.name for point in points],
            "epsilon": specs[0].epsilon if specs[0].private else "inf",
            "delta": specs[0].delta or 0.0,
        }
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(path, json.dumps(found, indent=1, sort_keys=True) + "\n")
    for point in points:
        point.stage.epsilon = float(found["epsilon"])
        point.stage.delta = found["delta"]
    return list(_as_named(points, found["points"], path)), delta


def _as_named(
    points: list[Point], names: list[str], path: pathlib.Path
) -> Iterator[Point]:
    """Yields the points of a grid by the names that their files have.

    A name tells of paths, too, so a workdir that was moved would give other ones. The
    points of one variant always have the same order.

    Raises:
      DataError: the plan at `path` has other points.
    """
    left: dict[str, list[str]] = {point.settings["variant"]: [] for point in points}
    for name in names:
        left.setdefault(str(name).rpartition("-")[0], []).append(name)
    counts = {variant: len(of_it) for variant, of_it in left.items()}
    if counts != collections.Counter(p.settings["variant"] for p in points):
        raise validation.DataError(
            path,
            f"its {len(names)} points are not those of its config",
            "Restore it from a backup.",
        )
    for point in points:
        name = left[point.settings["variant"]].pop(0)
        yield dataclasses.replace(point, name=name)


def _as_recorded(wanted: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out of a grid's settings what an older record lacks and what is off."""
    before, config = of.get("config"), wanted["config"]
    known = before.get("finetune") if isinstance(before, Mapping) else None
    own = private_training.recorded(config["finetune"], known)
    return {**wanted, "config": {**config, "finetune": own}}


def _paid_for(of: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leaves out what no point is trained with, and no score follows from."""
    config = of.get("config")
    if not isinstance(config, Mapping):
        return of
    writing = config.get("synthesize")
    if not isinstance(writing, Mapping):
        return of
    return {**of, "config": {**config, "synthesize": {**writing, "batch_size": None}}}


def _points(config: ml_collections.ConfigDict) -> Iterator[Point]:
    """Yields the points as `points_of`, with settings as they are written."""
    for point in points_of(config, "finetune"):
        yield dataclasses.replace(point, settings=workdir.plain(point.settings))


def _paid(run: pathlib.Path) -> bool:
    """Returns whether a step of a point's run was paid for."""
    path = run / ledger.FILE_NAME
    return path.is_file() and privacy.read_ledger(path).steps_paid > 0


def _require_certifiable(
    config: ml_collections.ConfigDict,
    points: list[Point],
    specs: list[privacy.PrivacySpec],
    delta: float,
) -> None:
    """Makes the selection that the certificate will be of, before its runs are paid.

    Raises:
      InputError: the runs could not be certified together.
    """
    runs = {
        point.name: privacy.TrainedRun(privacy.make_plan(spec), point.settings, None)
        for point, spec in zip(points, specs)
    }
    total = float(config.finetune.epsilon)
    choice = float(config.choice_epsilon or total)
    accounted = choice if config.choice == "accounted" else None
    privacy.Selection(runs, points[0].name, total, delta, accounted, "planned")


def _try(points: list[Point], specs: list[privacy.PrivacySpec]) -> None:
    """Builds all that training needs for every point, each thing once.

    Raises:
      InputError: a setting is invalid or does not fit the model.
    """
    made = set()
    for point, spec in zip(points, specs):
        stage = point.stage
        if stage.continues:
            raise validation.InputError(
                f"continues is {stage.continues!r}, but runs to choose among start "
                "from public weights. Leave it out of finetune and of every variant."
            )
        if stage.histogram:
            raise validation.InputError(
                f"histogram is {stage.histogram!r}, but no epsilon of runs to choose "
                "among counts it. Leave it out of finetune and of every variant."
            )
        if spec.private:
            sources.require_public(
                stage.init,
                sources.certificate_of_model(stage.init),
                f"epsilon {spec.epsilon} would not be all that was spent",
            )
        private_training.make_optimizer(stage, privacy.make_plan(spec))
        model = json.dumps({name: workdir.plain(stage[name]) for name in _MODEL})
        if model not in made:
            made.add(model)
            vocabulary = sources.vocabulary_file(stage.vocabulary, stage.init)
            starting_model.load_generator(stage, Tokenizer(vocabulary))
            tf.keras.backend.clear_session()
