"""Runs a stage: everything that is the same for all of them, in one place.

    validate    by the constructor of the settings
    open        every path of the settings, by record and certificate alone
    check       what the stage asks of settings and inputs
    place       the class of the output decides where it may go
    lock        one process makes an output
    skip        a finished output of the same settings and inputs
    run         into a directory under private/partial/
    compare     the output's class with its certificates
    rename      the output appears whole, with `stage.json`

A kill at any moment leaves an output that is there or not. What is in private/partial/
is removed by the next try, but for the shards of a pass; a training run goes on from
its ledger and state (see `runs`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from absl import logging

from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.frame import places, records, settings
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.devices import Devices, worker_errors
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.validation import InputError


class Given(dict):
    """The inputs of a stage, by the dotted names of their settings.

    A value is an artefact, `None` for a path that was left out, or a dict or a tuple of
    artefacts for a setting that holds several.
    """

    def each(self, covered: Sequence[str] = ()) -> Iterator[tuple[str, Artefact]]:
        """Yields name and artefact of every input that is there, but `covered` ones."""
        for name, value in self.items():
            inside: Mapping[Any, Any] = {"": value}
            if isinstance(value, (dict, tuple)):
                inside = value if isinstance(value, dict) else dict(enumerate(value))
            for key, artefact in inside.items():
                if artefact is not None and name not in covered:
                    yield f"{name}.{key}".rstrip("."), artefact

    def privacy(self, covered: Sequence[str] = ()) -> Privacy:
        """Returns the class of what is made from the inputs, by post-processing.

        An ε of the stage's own protects the `covered` ones.
        """
        return max((a.privacy for _, a in self.each(covered)), default=Privacy.PUBLIC)

    def certificate(self, covered: Sequence[str] = ()) -> dict[str, Any] | None:
        """Returns the certificate of what is made from the inputs; `None` for none.

        Raises:
          InputError: two inputs have guarantees of their own, which would add up.
        """
        found = {name: one for name, one in self.each(covered) if one.origin}
        if any(one.promised for one in found.values()):
            if len({one.origin for one in found.values()}) > 1:
                raise InputError(
                    f"{' and '.join(found)} have guarantees of their own, which would "
                    "add up. Use one."
                )
            return None
        return certificates.inherited_certificate(
            *(one.certificate for one in found.values())
        )


@dataclasses.dataclass(frozen=True)
class Context:
    """The context that a stage runs in.

    Attributes:
      settings: an instance of the stage's `Settings`.
      given: its inputs.
      place: where the output will be, and what is next to it.
      privacy: the output's class.
      inputs: fingerprints of the inputs.
      depends: stage, settings and inputs that the output depends on, as JSON.
      provenance: settings and inputs for the manifest of a set; see `data.sets`.
      certificate: what the output inherits, unless its run writes its own.
      out: the directory to fill.
      counts: exact private counts, to be kept under `private/`.
      devices: what models run on; see `devices`.
      beam: flags of Apache Beam, whose workers make shards; `None` for this process.
      parts: the parts of a pass.
    """

    settings: Any
    given: Given
    place: Place
    privacy: Privacy
    inputs: Mapping[str, str]
    depends: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    certificate: dict[str, Any] | None = None
    out: pathlib.Path = pathlib.Path()
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    devices: Devices | None = None
    beam: tuple[str, ...] | None = None
    parts: Any = ()

    def scope(self) -> contextlib.AbstractContextManager:
        """Returns the scope to make models in."""
        return (self.devices or Devices()).scope()


class Command:
    """A command, made by a file in `stages/`: a stage or a job.

    Attributes:
      name: of the command.
      Settings: the dataclass of its settings.
      strategies: values of `--strategy` it works under.
      sharded: whether it is a pass over shards (`--beam`).
    """

    name: ClassVar[str]
    Settings: ClassVar[type[settings.Settings]]
    strategies: ClassVar[tuple[str, ...]] = ("default",)
    sharded: ClassVar[bool] = False

    def config(self, **changes: Any) -> Any:
        """Returns the settings as a ConfigDict, for a config file."""
        found = settings.config_of(self.Settings)
        found.update(changes)
        return found


class Stage(Command):
    """One step of the work: what it takes, what it makes, how.

    A subclass is complete with `name`, `Settings` and `run`. All methods but `run` look
    at settings and artefacts alone, so they also work on promises.
    """

    def check(self, s: Any, given: Given) -> None:
        """Refuses settings and inputs that do not fit each other."""

    def covered(self, s: Any, given: Given) -> tuple[str, ...]:
        """Returns the inputs, private pairs, that an ε of the stage's own protects."""
        return ()

    def privacy(self, s: Any, given: Given) -> Privacy:
        """Returns the class of the output: that of all inputs together.

        Inputs that an ε covers make it certified; with canaries among them, private.
        """
        covered = self.covered(s, given)
        if any(a.facts.get("canaries") for name, a in given.each() if name in covered):
            return Privacy.PRIVATE
        found = given.privacy(covered)
        if found == Privacy.CERTIFIED:
            given.certificate(covered)  # refuses two
        return max(found, Privacy.CERTIFIED) if covered else found

    def certificate(self, s: Any, given: Given) -> dict[str, Any] | None:
        """Returns the certificate that the output inherits; a run may write its own.

        That of one private input, if there is one, says that nothing is guaranteed.
        """
        covered = self.covered(s, given)
        found = [a for _, a in given.each(covered) if a.privacy == Privacy.PRIVATE]
        if found:
            return next((dict(a.certificate) for a in found if a.certificate), None)
        return given.certificate(covered)

    def facts(self, s: Any, given: Given) -> dict[str, Any]:
        """Returns what may be known of the output before it is made, as JSON."""
        return {}

    def reads(self, s: Any, given: Given) -> list[tuple[str, str]]:
        """Returns private reads that no ε covers: what is read, and who sees it."""
        return []

    def also(self, c: Context) -> dict[str, str]:
        """Returns fingerprints of what it depends on besides settings and inputs."""
        return {}

    def run(self, c: Context) -> dict[str, Any]:
        """Fills `c.out`; returns what `stage.json` records."""
        raise NotImplementedError

    def line(self, result: Mapping[str, Any]) -> str:
        """Returns the result of `run` in a few words, for `status` and the report."""
        found = result.items()
        numbers = (f"{k} {v:g}" for k, v in found if isinstance(v, (int, float)))
        return ", ".join(numbers)


class ShardedStage(Stage):
    """A pass over a corpus: shard by shard, resumed after the last finished one.

    A subclass has `parts`, `start` and `merge` instead of `run`. Instances are pickled
    for Beam's workers, which have one device each.
    """

    sharded = True

    def parts(self, c: Context) -> Any:
        """Returns what each shard is made of; it has a length, and can be pickled."""
        raise NotImplementedError

    def start(self, c: Context) -> Any:
        """Loads models, once in a process; returns `make(index, shard_writer)`."""
        raise NotImplementedError

    def merge(self, c: Context, shards: Any) -> dict[str, Any]:
        """Fills `c.out` from all shards; returns what `stage.json` records."""
        raise NotImplementedError

    def run(self, c: Context) -> dict[str, Any]:
        """Makes the missing shards, then merges all."""
        from tfdpsq.run.frame import shards

        c = dataclasses.replace(c, parts=self.parts(c))
        return self.merge(c, shards.make_all(self, c))


def open_inputs(
    s: settings.Settings, promises: Mapping[str, Artefact] | None = None
) -> Given:
    """Opens every path in settings.

    Args:
      s: the settings.
      promises: outputs of earlier steps of a pipeline that are not there yet, by path.

    Raises:
      InputError: a path is missing, or leads to something else.
    """
    given = Given()
    for name, value, rule in settings.paths_of(s):
        opened = functools.partial(_opened, rule=rule, promises=promises or {})
        if isinstance(value, Mapping):
            given[name] = {key: opened(p, f"{name}.{key}") for key, p in value.items()}
        elif isinstance(value, tuple):
            given[name] = tuple(opened(p, f"{name}[{n}]") for n, p in enumerate(value))
        elif value or rule.required:
            given[name] = opened(value, name)
        else:
            given[name] = None
    return given


def _opened(
    path: str, name: str, rule: settings.Rule, promises: Mapping[str, Artefact]
) -> Artefact:
    if not path:
        raise InputError(f"{name} is ''. Give {rule.kind.wanted}.")
    for above in (path, *map(str, pathlib.PurePath(path).parents)):
        if above in promises:  # the output that it is, or is in
            return rule.kind.promised_by(promises[above], path)
    return rule.kind.open(path, name)


def execute(
    stage: Stage,
    s: settings.Settings,
    place: Place,
    devices: Devices | None = None,
    beam: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Runs a stage, unless its output is finished; returns the output's record.

    Args:
      stage: the stage.
      s: its settings.
      place: where the output goes.
      devices: what models run on; `None` for one device. Of several workers only the
        chief writes there; the others have a place that is removed.
      beam: flags of Apache Beam, whose workers make shards; `None` for this process.

    Raises:
      InputError: see the steps in the module's docstring.
      LostWorker: another worker ended.
    """
    devices = devices or Devices()
    with own_place(place, devices) as own:
        if own is None:
            return {"result": {}}
        return _executed(stage, s, own, devices, beam)


def _executed(
    stage: Stage,
    s: settings.Settings,
    place: Place,
    devices: Devices,
    beam: tuple[str, ...] | None,
) -> dict[str, Any]:
    given = open_inputs(s)
    written, own = settings.to_json(s), settings.identity(s)
    stage.check(s, given)
    facts, privacy = stage.facts(s, given), stage.privacy(s, given)
    certificate = stage.certificate(s, given)
    place.require(privacy, stage.name)
    with places.locked(place), places.owner_only() as umask:
        inputs = {name: one.fingerprint(place.private) for name, one in given.each()}
        c = Context(s, given, place, privacy, inputs, devices=devices, beam=beam)
        inputs.update(stage.also(c))
        c = dataclasses.replace(
            c,
            depends={"stage": stage.name, "settings": own, "inputs": inputs},
            provenance={"config": written, "inputs": inputs},
            certificate=certificate,
        )
        record = records.finished(place, c.depends)
        if record is not None:
            logging.info("%s: finished before, not made again", place.name)
        else:
            strict = getattr(s, "strict", False)
            for what, where in stage.reads(s, given):
                records.private_reads(place.private, strict).record(what, where)
            logging.info("%s: started", place.name)
            with records.timed(place) as counts:
                with places.appearing(place, privacy, umask) as out:
                    c = dataclasses.replace(c, out=out, counts=counts)
                    record = _made(stage, c, facts)
            logging.info("%s: finished", place.name)
        _clean(place)
    if "diverged" in record["result"]:
        raise InputError(
            f"{record['result']['diverged']} They are kept. Lower the learning rate in "
            "a run of its own; a finite epsilon adds up with this one's."
        )
    return record


def _made(stage: Stage, c: Context, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Fills an output; returns its record."""
    result = stage.run(c) or {}
    if not (c.out / certificates.FILE_NAME).is_file():
        records.write_certificate(c.out, c.certificate)
    records.require_class(c.out, c.privacy, c.place.path)
    return records.write_stage(
        c.out,
        c.depends,
        guarantee=c.privacy.word,
        settings=c.provenance["config"],
        facts=facts,
        result=result,
        line=stage.line(result),
    )


def _clean(place: Place) -> None:
    """Removes what a finished output has no use for: shards, and the seeds of noise."""
    if place.run.is_dir():
        from tfdpsq import privacy

        privacy.discard_state(place.run)
        shutil.rmtree(place.run / "backup", ignore_errors=True)
    shutil.rmtree(place.partial, ignore_errors=True)
    places.settle(place.path)


@contextlib.contextmanager
def own_place(place: Place, devices: Devices) -> Iterator[Place | None]:
    """Yields where this worker's output goes, or `None` where nothing is left to do.

    That of a worker that is not the chief is removed at the end, when all workers meet,
    so that all notice a failure of one.
    """
    if not devices.several_workers:
        yield place
        return
    with worker_errors():
        finished = devices.chiefs(os.path.isfile(f"{place.path}/{records.STAGE_FILE}"))
        if devices.chief:
            yield place
        elif finished:
            yield None
        else:
            folder = place.private / "workers" / devices.worker
            shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
            try:
                yield Place.of(folder / places.PRIVATE / place.name)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        if not finished:
            devices.chiefs(True)
