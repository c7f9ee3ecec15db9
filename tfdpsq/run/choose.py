"""Train a grid of generators on private pairs, and choose one by BLEU.

    python -m tfdpsq.run.choose --config=configs/choose.py --workdir=DIR

The paper's way to its hyperparameters (Carranza et al. 2024, table 1), with its cost.
Every point of the grid is a run of `finetune` on the same pairs, and ε counts them all
(see `privacy.proof.selection`). Each generator then writes a query for every document
that has a held-out one, and one generator is chosen:

- `choice = "declared"`: by the highest corpus BLEU. The held-out queries are read
  without noise, which no ε covers; the certificate lists this read.
- `choice = "accounted"`: by the exponential mechanism (`privacy.proof.choice`) over the
  sums of sentence BLEU, a number in [0, 1] per held-out query. With `strict`, which
  shows no losses, nothing is left to declare.

The cost of the draw is as derived there because a held-out query adds its own score and
changes no other. The query it is compared with is written by a generator that never saw
it, from random numbers that follow from the document's id, and does not depend on the
other documents (`generator.synthesis`, to the last bit on a CPU, where these queries
are written whatever trained the generator). The line of a query in the qrels alone
decides its split, and no query may be in both.

An interrupted stage resumes. All points must be finished before anything is scored;
those that diverged cannot be chosen, and count. The choice is drawn once: it is written
to disk before it is shown, and an existing one is kept. If a kill prevents the write,
nobody saw that draw, and the next one is the first.

Writes the chosen generator, with a certificate that names all runs. All points stay in
`private_directory`, under `choices/`: their guarantee is "private", for each one's own
certificate counts neither the other runs nor the choice.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import tensorflow as tf

from tfdpsq import evaluation, privacy, validation
from tfdpsq.data import Document, Pair, Tokenizer, atomic_write
from tfdpsq.generator import T5QueryGenerator, synthesis
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.privacy.proof import certified, choice
from tfdpsq.run import finetune, synthesize
from tfdpsq.run.core import (
    acting,
    command,
    layout,
    records,
    releases,
    settings,
    sources,
    spending,
    streams,
    workdir,
)
from tfdpsq.run.devices import strategy as strategies
from tfdpsq.run.training import choice_points, grid_points
from tfdpsq.run.training import context as contexts
from tfdpsq.run.training import private_training as training

CHOICES, SCORES = layout.CHOICES, layout.SCORES
CHOICE_FILE = layout.CHOICE_FILE


SETTINGS: settings.Declaration = {
    "choice": settings.Text("accounted", choice_points.MODES),
    "choice_epsilon": settings.Number(0.0, 0, 1e6),
    "held_out": settings.Text("dev", required=True),
    "finetune": finetune.SETTINGS,
    "variants": settings.Checked({"all": {}}, grid_points.check_variants),
    "axes": settings.Checked((("learning_rate", (1e-3,)),), grid_points.check_axes),
    "synthesize": {
        name: synthesize.SETTINGS[name]
        for name in ("temperature", "top_k", "top_p", "batch_size", "seed")
    },
}


ACTING = (acting.Only("synthesize.top_k synthesize.top_p", "synthesize.temperature"),)


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `finetune` has the settings of all points; its `epsilon` and `delta` are those of
    all together. Variants and axes are those of `grid`, with one more field: "epochs"
    sets `steps` to that many times n / `batch_size`. A `choice_epsilon` of 0 takes
    `finetune.epsilon`, which adds no cost: a query is either trained on or held out.
    `synthesize` has the fields of that stage that affect a query.
    """
    return settings.default_config(SETTINGS)


def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    devices: strategies.Devices = strategies.DEFAULT,
) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings or data, before any budget is spent; or all points
        diverged.
    """
    acting.check(config, SETTINGS, ACTING)
    for name, stage in choice_points.check(config):
        releases.require_short(f"{pathlib.Path(directory).name}-{name}")
        settings.check(stage, finetune.SETTINGS, f"points.{name}")
        devices.require_share(stage.batch_size)
        acting.require_acting(
            stage, finetune.SETTINGS, finetune.ACTING, f"points.{name}"
        )
    synthesize.writing(config.synthesize, config.finetune)
    shared = config.finetune
    context = contexts.resolve(
        shared,
        directory,
        devices,
        "a generator chosen among some that were trained on private queries",
    )
    return workdir.run_stage(
        context.output,
        config,
        context.inputs,
        _Choice(config, directory, context.private, context.inputs, devices).make,
    )


class _Choice:
    """One run of the stage: its points, and its records of them."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        directory: pathlib.Path,
        private: pathlib.Path,
        inputs: Mapping[str, str],
        devices: strategies.Devices = strategies.DEFAULT,
    ):
        self._config = config
        self._devices = devices
        self._name = directory.name
        self._private = private
        self._own = private / CHOICES / directory.name
        self._inputs = inputs

    def make(self, out: pathlib.Path) -> dict[str, Any]:
        train, held_out = self._pairs()
        points, delta = choice_points.planned(
            self._config,
            train,
            self._own,
            self._run,
            self._inputs,
            self._devices.replicas,
        )
        if spending.is_limited():
            self._require_within_budget(points, train)
        own = {point.name: self._train(point) for point in points}
        tried = [name for name, found in own.items() if not found["diverged"]]
        if not tried:
            raise validation.InputError(
                f"all {len(points)} points diverged, and were paid for. Lower the "
                "learning rates of the next grid, whose budget adds up with this one's."
            )
        chosen = self._chosen(tried, len(points), held_out)
        runs = {}
        for point in points:
            spent = own[point.name]["certificate"]
            runs[point.name] = privacy.TrainedRun(
                certified.plan_of(spent)[0],
                point.settings,
                spent["ledger_head"],
                own[point.name]["diverged"],
            )
        selection = privacy.Selection(
            runs,
            chosen["chosen"],
            float(self._config.finetune.epsilon),
            delta,
            chosen["epsilon"],
            chosen["score"],
            chosen.get("draw"),
        )
        certificate = privacy.make_selection_certificate(
            selection,
            own[selection.chosen]["certificate"],
            records.all_private_reads(self._private),
        )
        for path in sorted(self._point(selection.chosen).iterdir()):
            if path.name not in (workdir.STAGE_FILE, certificates.FILE_NAME):
                copy = shutil.copytree if path.is_dir() else shutil.copyfile
                copy(path, out / path.name)
        records.write_certificate(out, certificate)
        chosen_settings = dict(runs[selection.chosen].settings)
        streams.say(f"chosen among {len(runs)}: {chosen_settings}\n")
        return {"chosen": chosen_settings, "steps_of_all_runs": selection.steps}

    def _require_within_budget(self, points: Any, train: sources.Source) -> None:
        """Refuses the whole grid if it would exceed the budget of the command line."""
        stage = self._config.finetune
        units = training.units_of(train, stage.unit, stage.user_field)
        spending.require_within(
            {
                point.name: privacy.make_plan(training.spec_of(point.stage, units))
                for point in points
            },
            self._inputs["pairs"],
            self._choice_epsilon if self._config.choice == "accounted" else None,
        )

    @property
    def _choice_epsilon(self) -> float:
        return float(self._config.choice_epsilon or self._config.finetune.epsilon)

    def _pairs(self) -> tuple[sources.Source, Sequence[Pair]]:
        """Returns the training pairs, and the held-out pairs.

        Raises:
          InputError: no pairs, or a query in both.
        """
        shared = self._config.finetune
        train, held_out = (
            sources.load_source(shared.pairs, split, shared.unit)
            for split in (shared.split, self._config.held_out)
        )
        held = {pair.query_id for pair in held_out.pairs}
        both = {pair.query_id for pair in train.pairs if pair.query_id in held}
        if both:
            raise validation.InputError(
                f"{shared.pairs}: {len(both)} queries are in both splits "
                f"{shared.split!r} and {self._config.held_out!r}, such as "
                f"{min(both)!r}. Each would affect both training and the choice, and "
                "the costs would add up. Leave them in one."
            )
        return train, held_out.pairs

    def _point(self, name: str) -> pathlib.Path:
        """Returns the directory of a point's generator."""
        return self._own / layout.POINTS / f"{self._name}-{name}"

    def _run(self, name: str) -> pathlib.Path:
        """Returns the directory of the secrets, states and ledger of a point's run."""
        return self._private / workdir.RUNS / self._point(name).name

    def _train(self, point: grid_points.Point) -> dict[str, Any]:
        """Trains a point; returns its cost, and whether it diverged."""
        stage, out = point.stage, self._point(point.name)
        with stage.unlocked():
            stage.private_directory = str(self._private)
        failed = self._own / layout.DIVERGED / f"{point.name}.json"
        if not failed.is_file():
            try:
                # Its certificate is of one run, and the choice read the others, too.
                finetune.run(stage, out, self._devices, stays_private=True)
            except finetune.DivergedError as error:
                failed.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(failed, json.dumps(error.certificate))
            tf.keras.backend.clear_session()
            self._devices.notice.end_if_asked()
        if failed.is_file():
            training.close_run(self._run(point.name), out)
            return {
                "certificate": certificates.load_certificate(failed),
                "diverged": True,
            }
        return {"certificate": privacy.read_certificate(out), "diverged": False}

    def _chosen(self, names: list[str], runs: int, held_out: Sequence[Pair]) -> dict:
        """Returns the chosen point; reads it from disk if the choice was made."""
        path = self._own / CHOICE_FILE
        if not path.is_file():
            found = self._choice(names, runs, held_out)
            atomic_write(path, json.dumps(found, indent=1) + "\n")
        if self._config.choice == "accounted":
            # Scores have no further use, and must never be shown.
            shutil.rmtree(self._own / SCORES, ignore_errors=True)
        return workdir.read_json(path, chosen=str, score=str)

    def _choice(self, names: list[str], runs: int, held_out: Sequence[Pair]) -> dict:
        """Scores the points and chooses one."""
        if self._config.choice == "accounted":
            sums = [self._scores(name, held_out)["sum"] for name in names]
            epsilon = self._choice_epsilon
            return {
                "chosen": names[choice.choose(sums, epsilon)],
                "epsilon": epsilon,
                "draw": secrets.token_hex(16),
                "score": "sentence BLEU of the query written for the same document, "
                f"from 0 to 1: {evaluation.sentence_bleu_signature()}",
            }
        records.private_reads(self._private, self._config.finetune.strict).record(
            f"BLEU of {runs} generators against the queries of split "
            f"{self._config.held_out!r}, by which one of them was chosen",
            f"which generator {self._name} is, the terminal, and "
            f"{CHOICES}/{self._name}/{SCORES} under private/",
        )
        scores = {name: self._scores(name, held_out) for name in names}
        for name, score in scores.items():
            streams.say(f"BLEU {score['bleu']:7.3f}: {name}\n")
        best = max(names, key=lambda name: scores[name]["bleu"])
        signature = scores[best]["signature"]
        return {"chosen": best, "epsilon": None, "score": f"corpus BLEU: {signature}"}

    def _scores(self, name: str, held_out: Sequence[Pair]) -> dict[str, Any]:
        """Returns a point's scores on the held-out queries; kept until the choice."""
        path = self._own / SCORES / f"{name}.json"
        if not path.is_file():
            # Where rounding may follow from the other rows of a batch, a query more
            # could change what is written for another one; see the module.
            private = self._config.choice == "accounted"
            with tf.device("CPU:0") if private else contextlib.nullcontext():
                try:
                    written = self._written(name, held_out)
                except (MemoryError, tf.errors.ResourceExhaustedError) as error:
                    raise validation.InputError(
                        "there is not enough memory to write queries with "
                        "synthesize.batch_size "
                        f"{self._config.synthesize.batch_size}. All points are paid "
                        "for and kept: run the same with a smaller one."
                    ) from error
            queries = [written[pair.document_id] for pair in held_out]
            found: dict[str, Any]
            if self._config.choice == "declared":
                bleu = evaluation.corpus_bleu(queries, [p.query for p in held_out])
                found = {"bleu": bleu.score, "signature": bleu.signature}
            else:
                each = map(
                    evaluation.sentence_bleu, queries, (p.query for p in held_out)
                )
                found = {"sum": choice.sum_of_scores(each)}
            path.parent.mkdir(exist_ok=True)
            atomic_write(path, json.dumps(found))
        if self._config.choice == "declared":
            return workdir.read_json(path, bleu=(int, float), signature=str)
        return workdir.read_json(path, sum=(int, float))

    def _written(self, name: str, held_out: Sequence[Pair]) -> dict[str, str]:
        """Returns document id -> the query that a point's generator writes."""
        stage = self._config.finetune
        out = self._point(name)
        trained = workdir.read_json(out / workdir.STAGE_FILE)["config"]
        vocabulary = sources.trained_vocabulary(trained["vocabulary"], out)
        contents = {pair.document_id: pair.document for pair in held_out}
        rows = synthesis.synthesize(
            T5QueryGenerator.from_preset(out),
            Tokenizer(vocabulary),
            (Document(key, "", text) for key, text in contents.items()),
            synthesize.writing(self._config.synthesize, trained),
            stage.jit_compile and self._config.choice == "declared",
        )
        written = {row.document_id: row.query for row in rows}
        tf.keras.backend.clear_session()
        return written


if __name__ == "__main__":
    command.main(run, strategies.ONE_PROCESS, spends=True)
