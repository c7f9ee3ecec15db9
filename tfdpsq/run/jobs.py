"""A job: a list of steps, checked as a whole before the first one runs.

A step names its stage, its settings, and which of its inputs are outputs of earlier
steps. Until those are there, later steps are checked on their promises: places, privacy
classes and facts follow from settings alone. The list is written to
`private/pipeline.json`, from which `status`, `results.py` and the report have all
names.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from tfdpsq.data import io
from tfdpsq.run.frame import places, records, runner, runs, settings
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.validation import InputError

LIST_FILE = "pipeline.json"
# From `Job.counts` to settings that fit, and how long a step of a stage takes, in
# seconds by the stage's name: the `fit` of a config file.
Fit = Callable[..., tuple[settings.Settings, Mapping[str, float]]]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a job.

    Attributes:
      name: of the output's directory.
      stage: what makes it.
      settings: the stage's; paths may be a `StepOutput`.
      label: its name in tables.
      shows: anything else that the report needs of it, as JSON.
    """

    name: str
    stage: runner.Stage
    settings: settings.Settings
    label: str = ""
    shows: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A step with its place, its class, and the paths of its inputs."""

    step: Step
    place: Place
    privacy: Privacy
    settings: settings.Settings


class Job(runner.Command):
    """A command that runs a list of steps in one workdir."""

    strategies = ("default", "mirrored", "tpu")

    def steps(self, s: Any, workdir: pathlib.Path) -> list[Step]:
        """Returns the steps; refuses settings that do not fit each other."""
        raise NotImplementedError

    def counts(self, s: Any, workdir: pathlib.Path) -> Sequence[int] | None:
        """Returns the counts that sizes follow; `None` before the first step is run."""
        raise NotImplementedError

    def start(self, s: Any, workdir: pathlib.Path) -> None:
        """Does what comes before the first step, once all are checked."""

    def finish(self, s: Any, planned: Sequence[Planned], workdir: pathlib.Path) -> Any:
        """Writes the report, once all steps are finished."""


def run(
    job: Job,
    s: settings.Settings,
    workdir: pathlib.Path,
    devices: Any = None,
    fit: Fit | None = None,
) -> Any:
    """Runs a job, or the rest of it; returns what its `finish` does.

    With `fit`, sizes follow the data, and the expected end is logged.

    Raises:
      InputError: what any step refuses, before the first one runs where that shows
        from settings and inputs.
    """
    logging.info("%s: reading the data", job.name)
    seconds: Mapping[str, float] = {}
    with places.locked(Place.of(workdir / places.PRIVATE / job.name)):
        if fit is not None:
            s, seconds = _fitted(job, s, workdir, devices, fit)
        planned = plan(job.steps(s, workdir), workdir)
        left = [e for e in planned if records.read_stage(e.place.path) is None]
        end = time.time() + sum(seconds.get(each.step.stage.name, 0) for each in left)
        until = time.strftime(", until about %a %H:%M", time.localtime(end))
        logging.info("%d steps left%s", len(left), until if seconds else "")
        write_list(job, s, planned, workdir)
        job.start(s, workdir)
        for each in planned:
            runner.execute(each.step.stage, each.settings, each.place, devices)
            if devices is not None:
                devices.notice.end_if_asked()
            if "tensorflow" in sys.modules:
                # Keras keeps every graph; those of a dozen stages would add up.
                import tensorflow as tf

                tf.keras.backend.clear_session()
            gc.collect()
        return job.finish(s, planned, workdir)


def _fitted(
    job: Job, s: settings.Settings, workdir: pathlib.Path, devices: Any, fit: Fit
) -> tuple[settings.Settings, Mapping[str, float]]:
    """Returns what `fit` does, once the data are there."""
    while (counts := job.counts(s, workdir)) is None:
        # All steps are checked before the first one imports a log.
        first = plan(job.steps(s, workdir), workdir)[0]
        runner.execute(first.step.stage, first.settings, first.place, devices)
    fitted, seconds = fit(*counts)
    changed = records.differences(settings.to_json(s), settings.to_json(fitted), 20)
    said = "sizes of the config (there) that follow the data (now): %s"
    logging.info(said, changed or "none differs")
    return fitted, seconds


class StepOutput(str):
    """Name of an earlier step as an input, and what is in its output: "prepare/set"."""


def plan(steps: Sequence[Step], workdir: pathlib.Path) -> list[Planned]:
    """Checks all steps, on promises of those before; returns them with their places.

    Raises:
      InputError: what a step refuses; or a finished step, or one that has paid, that
        was made with other settings.
    """
    promises: dict[str, Artefact] = {}
    places_of: dict[str, str] = {}
    planned = []
    for step in steps:
        if step.name in places_of:
            raise ValueError(f"two steps are called {step.name}")
        try:
            s = _with_paths(step.settings, places_of)
            given = runner.open_inputs(s, promises)
            step.stage.check(s, given)
            privacy = step.stage.privacy(s, given)
        except InputError as error:
            raise InputError(f"{step.name}: {error}") from error
        folder = places.PRIVATE if privacy == Privacy.PRIVATE else places.RELEASE
        place = Place.of(workdir / folder / step.name)
        _require_unchanged(step.stage, s, place)
        if records.read_stage(place.path) is None:
            covered = step.stage.covered(s, given)
            origins = sorted({one.origin for _, one in given.each(covered)})
            own = step.name if privacy == Privacy.CERTIFIED else ""
            origin = next(filter(None, origins), own)
            facts = step.stage.facts(s, given)
            promises[place.path] = Artefact(
                place.path, privacy, None, facts, origin, True
            )
        places_of[step.name] = place.path
        planned.append(Planned(step, place, privacy, s))
    return planned


def _with_paths(value: Any, places_of: Mapping[str, str]) -> Any:
    """Returns settings with the path of every output of an earlier step."""
    if isinstance(value, StepOutput):
        name, _, inside = value.partition("/")
        return os.path.join(places_of[name], inside).rstrip("/")
    if isinstance(value, Mapping):
        return {key: _with_paths(each, places_of) for key, each in value.items()}
    if isinstance(value, settings.Settings):
        names = [field.name for field in dataclasses.fields(value)]
        own = {name: _with_paths(getattr(value, name), places_of) for name in names}
        return dataclasses.replace(value, **own)
    return value


def _require_unchanged(stage: runner.Stage, s: Any, place: Place) -> None:
    """Refuses settings that a finished step, or a paid run, was not made with.

    Inputs are compared when the step runs: some are not there yet.
    """
    own = settings.identity(s)
    found = records.read_stage(place.path)
    if found is not None:
        records.finished(place, {**found["depends"], "settings": own})
    elif runs.steps_paid(place):
        record = io.read_json(place.run / runs.RUN_FILE, "Restore it from a backup")
        runs.require_same_run(place, {**record["depends"], "settings": own})


def write_list(
    job: Job, s: settings.Settings, planned: Sequence[Planned], workdir: pathlib.Path
) -> None:
    """Writes the list of a job's steps for those that read a workdir."""
    steps = [
        {
            "name": each.step.name,
            "stage": each.step.stage.name,
            "place": os.path.relpath(each.place.path, workdir),
            "guarantee": each.privacy.word,
            "label": each.step.label or each.step.name,
            "shows": dict(each.step.shows),
        }
        for each in planned
    ]
    with places.owner_only():
        path = places.open_private(workdir / places.PRIVATE) / LIST_FILE
        content = {"job": job.name, "settings": settings.to_json(s), "steps": steps}
        io.write_json(path, content)
