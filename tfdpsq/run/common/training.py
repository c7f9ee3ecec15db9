"""Shared by stages that train: settings, units, and a paid run.

A private run is paid for in this order: the number of units is declared, the plan made,
composed with the releases that it follows, and the run's directory opened; then
`privacy.train` pays for each step before it is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfdpsq import privacy
from tfdpsq.data import Pair, RowStore, Tokenizer, write_rows
from tfdpsq.data.tokenization import CHUNK, VOCABULARY_FILE
from tfdpsq.generator import checkpoints, pretraining
from tfdpsq.privacy import checkpoint, fast, optimizers, spec, workers
from tfdpsq.privacy.plan import MOST_EPSILON
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.certificate import verified_runs
from tfdpsq.privacy.randomness import secure
from tfdpsq.privacy.training import digest_of_weights
from tfdpsq.run.common.kinds import MODEL, File, Generator, Pairs, Rows
from tfdpsq.run.common.progress import Progress
from tfdpsq.run.frame import records, runs, settings
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.places import Privacy, open_private
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import Rule, nested, path, setting
from tfdpsq.validation import InputError

LOSS_READ = (  # what is read, and who sees it
    "the training loss of every step, averaged over its batch, and how long it took",
    "the terminal, and logs/ under private/",
)
COMPOSED = "composed"
STRATEGIES = ("default", "mirrored", "tpu", "multiworker")
DTYPES = ("float32", "mixed_bfloat16")
# Inputs that are private queries in one form or another.
_PROTECTED = ("pairs", "hard_negatives.run", "queries")


# -- Settings --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class UnitSettings(settings.Settings):
    """Settings of any private release; see `PrivacySpec`."""

    pairs: str = path(Pairs, "pydocs")
    split: str = setting("train")
    delta: float = setting(0.0, ge=0, lt=1, help="0 is 1/(2n)")
    accountant: str = setting("pld", choices=spec.ACCOUNTANTS)
    unit: str = setting(
        "query",
        choices=spec.UNITS,
        help="query: with one document; pair: the paper's, and weaker, as a query of "
        "k pairs is k units; user: the owner in user_field",
    )
    user_field: str = setting(
        "user_id", when={"unit": ("user",)}, help="of queries.jsonl's metadata"
    )
    rows_per_unit: int = setting(1, ge=1, when={"unit": ("user",)})
    n_is_public: bool = setting(False, help="the exact number of units may be known")
    n_bound: int = setting(0, ge=0, le=10**15, help="else a public bound on it")
    secure: bool = setting(False, help="cryptographic draws, noise safe in floats")
    strict: bool = setting(False, help="leave out or refuse reads that no ε covers")


@dataclasses.dataclass(frozen=True)
class PrivacySettings(UnitSettings):
    """Settings of a private training run; without an ε, most do nothing."""

    epsilon: float = setting(8.0, gt=0, le=MOST_EPSILON, inf=True)
    clip_norm: float = setting(0.1, gt=0, le=1e6)
    sampler: str = setting("poisson", choices=spec.SAMPLERS)
    engine: str = setting("fast", choices=spec.ENGINES)
    save_every: int = setting(50, ge=1, le=10**9, speed=True, help="steps")
    jit_compile: bool = setting(False)
    seed: int = setting(0, ge=0, le=settings.SEED)


@dataclasses.dataclass(frozen=True)
class T5Settings(settings.Settings):
    """The shape of a T5 with random weights; see `layers.T5Config`."""

    vocabulary_size: int = setting(32128, ge=1, le=10**7)
    num_layers: int = setting(8, ge=1, le=10_000)
    num_heads: int = setting(6, ge=1, le=10_000)
    hidden_dim: int = setting(512, ge=1, le=10**6)
    intermediate_dim: int = setting(1024, ge=1, le=10**6)
    key_value_dim: int = setting(64, ge=1, le=10**6)
    version: str = setting("1.1", choices=("1.0", "1.1"))
    dropout: float = setting(0.1, ge=0, lt=1)


@dataclasses.dataclass(frozen=True)
class ModelSettings(PrivacySettings):
    """Settings of training a T5, or a retriever with its encoder."""

    init: str = path(Generator, "", help='"" starts from random weights, by t5')
    vocabulary: str = path(File, "", when={"init": ("",)})
    t5: Any = nested(T5Settings, when={"init": ("",)})
    continues: str = setting(
        "",
        choices=("", COMPOSED, *budget.DISJOINT),
        help="runs that init came from: composed counts them, too; time, user declares "
        "that they had no query, or no user, of these pairs",
    )
    trained: tuple[str, ...] = setting(
        ("*",),
        of=Rule(),
        help='patterns of paths: "*layer_norm*"; "query_tower/*" of a retriever with '
        "shared = False keeps an index of documents valid",
    )
    dtype: str = setting("float32", choices=DTYPES)
    document_length: int = setting(384, ge=2, le=10**6, help="tokens, end included")
    query_length: int = setting(128, ge=2, le=10**6)
    steps: int = setting(1000, ge=0, le=10**9)
    epochs: float = setting(0.0, ge=0, le=1e6, help="instead of steps, which are 0")
    optimizer: str = setting("adam", choices=spec.OPTIMIZERS)
    learning_rate: float = setting(1e-3, gt=0, le=1e3)
    schedule: str = setting("constant", choices=("constant", "cosine"))


# -- What the runner asks of a stage that trains ---------------------------------------

Planned = tuple[Any, "Units", privacy.PrivacyPlan]  # settings have the run's steps


class Training(Stage):
    """A stage that trains on `pairs`, under a guarantee where `epsilon` is finite."""

    strategies: ClassVar[tuple[str, ...]] = STRATEGIES

    def covered(self, s: Any, given: Given) -> tuple[str, ...]:
        """A finite ε protects private pairs, and what was made of each by itself."""
        if not given["pairs"].raw or math.isinf(s.epsilon):
            return ()
        return tuple(name for name in _PROTECTED if given.get(name) is not None)

    def reads(self, s: Any, given: Given) -> list[tuple[str, str]]:
        """Losses are shown; strict mode leaves them out."""
        if s.strict or not given["pairs"].raw:
            return []
        return [LOSS_READ]

    def plan(self, c: Context) -> Planned:
        """Returns the settings of a run, with its steps, its units and its plan."""
        raise NotImplementedError


def require_finite(model: tf.keras.Model, s: Any) -> None:
    """Refuses weights that `fit` left as NaN or infinity."""
    if not all(np.isfinite(v.numpy()).all() for v in model.trainable_variables):
        raise InputError(
            "training diverged: the weights hold NaN or infinity. Lower learning_rate "
            f"(now {s.learning_rate})."
        )


def require_steps(s: Any) -> None:
    """Refuses steps and epochs together, and neither of them."""
    if bool(s.epochs) == bool(s.steps):
        raise InputError(
            f"epochs is {s.epochs} and steps {s.steps}. Set one of them to 0, and not "
            "the other."
        )


def require_continuable(s: Any, given: Given) -> None:
    """Refuses pairs, starting weights or a histogram that no certificate counts."""
    init, histogram, raw = given["init"], given.get("histogram"), given["pairs"].raw
    follows = init is not None and init.privacy > Privacy.PUBLIC
    finite = math.isfinite(s.epsilon)
    if finite and not raw:
        raise InputError(
            f"epsilon is {s.epsilon}, but {given['pairs'].path} is a set, where noise "
            'now would certify nothing. Set epsilon to "inf".'
        )
    if histogram is not None and (s.continues or not finite):
        raise InputError(
            f"histogram is {histogram.path}, which counts within a finite epsilon, but "
            f"epsilon is {s.epsilon} and continues {s.continues!r}. Leave it out."
        )
    if s.continues and not (follows and finite):
        raise InputError(
            f"continues is {s.continues!r}, but no private run is continued: init is "
            f"{init and init.path!r}, and epsilon {s.epsilon}. Leave continues out."
        )
    if finite and follows and not s.continues:
        raise InputError(
            f"init is {init.path}, which was itself trained on private queries, so "
            f"epsilon {s.epsilon} is not all that is spent. Start from public weights, "
            "or set continues: 'composed' counts all runs together; 'time' or 'user' "
            "declares that the earlier ones had other queries, or other users."
        )


def start_of(c: Context) -> str:
    """Returns the directory of the weights that `init` names, or ""."""
    found = "" if c.given["init"] is None else c.given["init"].path
    return f"{found}/{MODEL}" if os.path.isdir(f"{found}/{MODEL}") else found


def tokenizer_of(c: Context) -> Tokenizer:
    """Returns the vocabulary next to the weights of `init`, or the one given."""
    given, start = c.given.get("vocabulary"), start_of(c)
    file = given.path if given else start and checkpoints.vocabulary_in(start)
    if not file:
        raise InputError(
            f"init is {c.settings.init!r}, without {VOCABULARY_FILE}. Set vocabulary "
            "to one that prepare wrote, or put the vocabulary of init next to it."
        )
    return Tokenizer(file)


def require_characters(c: Context, tokenizer: Tokenizer) -> None:
    """Names characters of the first documents, which are public, that T5 lacks."""
    read = c.given["pairs"].beir().documents() if c.given["pairs"].raw else ()
    texts = (document.content for document in itertools.islice(read, 20_000))
    lacking, share = tokenizer.unknown(texts)
    most = " ".join(character for character, _ in lacking.most_common(20))
    said = f"{tokenizer.file} lacks {len(lacking)} characters, {share:.1%} of the "
    said += f"documents' text, which no query can have: {most}"
    if share > 0.5:
        raise InputError(f"{said}. Start from a T5 of this language.")
    if lacking:
        logging.warning("%s", said)


# -- Units and plan --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Units:
    """The units that the guarantee protects, and the pairs to train on."""

    rows: Rows
    count: int  # private unless declared otherwise
    groups: privacy.Groups | None  # of pairs by user
    private: bool  # whether these are private pairs
    n: int  # that may be published


def units_in(s: Any, pairs: Pairs) -> Units:
    """Returns the units of the pairs to train on, if their number is declared once."""
    rows = pairs.load(s.split, s.unit)
    count, groups = rows.count, None
    if rows.table is None:
        return Units(rows, count, None, False, count)
    if s.unit == "user":
        groups = privacy.Groups.of(pairs.beir().owners(rows.table, s.user_field))
        count = len(groups)
    if s.n_is_public == bool(s.n_bound):
        raise InputError(
            f"n_is_public is {s.n_is_public} and n_bound {s.n_bound}. Set one of them: "
            f"n_is_public to True if the number of {s.unit} units may be published, or "
            "n_bound to a public bound on it."
        )
    if not s.n_is_public and count > s.n_bound:
        raise InputError(
            f"n_bound is {s.n_bound}, but the data hold more units. Declare a larger "
            "bound."
        )
    return Units(rows, count, groups, True, s.n_bound or count)


def units_of(c: Context) -> Units:
    """Returns the units of a stage's pairs, and records how many there are."""
    units = units_in(c.settings, c.given["pairs"])
    if units.private:
        c.counts["units"] = units.count
    return units


def with_steps(s: Any, n: int) -> Any:
    """Returns settings with the steps that their epochs take, of n units.

    An epoch of shuffled batches leaves out what fills no batch.
    """
    if not s.epochs:
        return s
    epoch = n // s.batch_size if s.sampler == "shuffled" else n / s.batch_size
    return dataclasses.replace(s, steps=max(1, round(s.epochs * epoch)), epochs=0.0)


def spec_of(s: Any, units: Units, **changes: Any) -> privacy.PrivacySpec:
    """Returns the spec of settings with steps, and of what the stage `changes`."""
    if s.secure:
        secure.require()
    names = "epsilon clip_norm accountant sampler unit rows_per_unit secure".split()
    names = [name for name in (*names, "batch_size", "steps") if name not in changes]
    return privacy.PrivacySpec(
        num_units=units.n,
        n_is_public=s.n_is_public or not units.private,
        delta=(s.delta or None) if math.isfinite(s.epsilon) else None,
        **{name: getattr(s, name) for name in names},
        **changes,
    )


# -- The run ---------------------------------------------------------------------------


def _earlier(c: Context) -> tuple[Artefact | None, str | None]:
    """Returns the release that a run follows, and how their logs are disjoint."""
    continues = getattr(c.settings, "continues", "")
    if not continues:
        return c.given.get("histogram"), None
    return c.given["init"], None if continues == COMPOSED else continues


def runs_of(artefact: Artefact) -> Sequence[budget.Run]:
    """Returns the runs that an artefact's certificate counts."""
    if artefact.certificate is None:
        raise InputError(f"{artefact.path} has no certificate. Leave it out.")
    return verified_runs(artefact.certificate, f"the certificate of {artefact.path}")


def open_run(c: Context, plan: privacy.PrivacyPlan) -> None:
    """Opens `c.place.run`, if the run composes with those it follows."""
    before, disjoint = _earlier(c)
    if before is not None:
        earlier = runs_of(before)
        own = budget.follow(plan, plan.spec.steps, c.inputs["pairs"], earlier, disjoint)
        budget.compose(budget.sharing([own, *earlier]))
    runs.open_run(c)


def stored_rows(c: Context, pairs: Iterator[Pair], encode: Callable) -> RowStore:
    """Returns the pairs as rows on disk, next to the run's state."""
    path = c.place.run / checkpoint.STATE / "rows"
    if path.is_dir():  # left by a run that was killed
        store = RowStore(path)
        store.verify()
        return store
    chunks = iter(lambda: list(itertools.islice(pairs, CHUNK)), [])
    return write_rows(path, map(encode, chunks))


def train(
    c: Context,
    planned: Planned,
    model: tf.keras.Model,
    losses: Callable,
    optimizer: Any,
    take: Callable,
    microbatch_size: int,
    **options: Any,
) -> dict[str, Any]:
    """Calls `privacy.train` in the run that `open_run` opened; shows its progress.

    Model and optimizer were made in `c.scope()`; what follows are arguments of
    `privacy.train`. Raises `Preempted` after a signal to end.

    Returns:
      "steps_executed", those paid for; and "diverged", what to say of weights that are
      not of the last step.
    """
    assert c.devices is not None
    s, units, plan = planned
    progress = Progress(
        c.place.logs,
        plan.spec.steps,
        measured=not s.strict,
        save_every=s.save_every,
        epsilon=plan.epsilon_so_far if units.private else None,
    )
    with c.scope(), progress, c.devices.notice.training() as asked:
        # Also variables that are not trained: workers may have different files.
        workers.copy_from_chief(model.variables)

        def on_step(step: int, loss: float) -> None:
            progress(step, loss)
            if asked():
                raise privacy.Preempted(step)

        try:
            paid = privacy.train(
                plan,
                losses,
                model.trainable_variables,
                optimizer,
                take,
                microbatch_size,
                units=units.count if units.groups is None else units.groups,
                directory=c.place.run,
                data_fingerprint=c.inputs["pairs"],
                save_every=s.save_every,
                on_step=on_step,
                jit_compile=s.jit_compile,
                **options,
            )
        except privacy.Diverged as error:
            said = (
                f"training diverged at step {error.diverged_at}: these are the weights "
                f"of step {error.weights_of}. All {error.paid} steps of the plan are "
                "paid for and counted, taken or not."
            )
            return {"steps_executed": error.paid, "diverged": said}
    return {"steps_executed": paid}


def certify(
    c: Context,
    plan: privacy.PrivacyPlan,
    result: Mapping[str, Any],
    training: Mapping[str, Any],
    **stated: Any,
) -> None:
    """Writes the certificate of a run on private pairs, and of what it follows.

    It lists all private reads of the workdir so far: earlier ones may have influenced
    this run's settings. `training` and `stated` are attributes of `Certificate`, with
    "run_id" `None` where there is no ledger.
    """
    assert c.devices is not None
    before, disjoint = _earlier(c)
    diverged = {"diverged": result["diverged"]} if "diverged" in result else {}
    if "run_id" not in stated:
        # Only the chief of several workers has the ledger, and keeps the output.
        stated["run_id"] = runs.run_id(c.place) if c.devices.chief else None
    certificate = privacy.make_certificate(
        plan,
        result["steps_executed"],
        training={**training, **diverged},
        earlier=None if before is None else before.certificate,
        disjoint=disjoint,
        fingerprints={**c.inputs, "code": privacy.code_fingerprint()},
        private_reads=records.private_reads(c.place.private).entries,
        **stated,
    )
    records.write_certificate(c.out, certificate)


# -- Training by `fit`, without a guarantee --------------------------------------------


class Backup(NamedTuple):
    """The folder of a run's backups, steps of an epoch, and the steps that are done."""

    folder: pathlib.Path
    per_epoch: int
    done: int


def open_backup(c: Context, s: Any) -> Backup:
    """Opens the backups of this run, which the runner removes at the end."""
    per_epoch = min(s.save_every, s.steps)
    own = records.digest([c.depends, per_epoch])[:16]
    folder = open_private(c.place.run / "backup" / own)
    with c.scope():  # of several workers all have the chief's number
        epochs = workers.chiefs_number(pretraining.epochs_in(folder))
    if epochs:
        logging.info("going on after step %d", epochs * per_epoch)
    return Backup(folder, per_epoch, epochs * per_epoch)


def fit(
    c: Context,
    s: Any,
    model: tf.keras.Model,
    dataset: Any,
    backup: Backup,
    callbacks: Sequence[tf.keras.callbacks.Callback],
    measured: bool = True,
    **options: Any,
) -> None:
    """Calls `model.fit` in `c.scope()`, from the last backup to the last step.

    `dataset` begins with step `backup.done`. Callbacks are called before a backup.
    Unless `measured`, no loss is shown. Raises `Preempted` after a signal to end.
    """
    assert c.devices is not None
    every, done = backup.per_epoch, backup.done
    progress = Progress(c.place.logs, s.steps, measured=measured, save_every=every)
    slots = optimizers.build(model.optimizer, model.trainable_variables)
    state = [*model.variables, *slots]  # which the chief alone restores

    def on_batch_end(batch: int, logs: Any) -> None:
        nonlocal done
        done += 1
        progress(done, logs["loss"])
        if done >= s.steps:
            model.stop_training = True
        elif any(workers.any_of(asked())):
            raise privacy.Preempted(done)

    with progress, c.devices.notice.training() as asked:
        model.fit(
            dataset,
            epochs=math.ceil(s.steps / every),
            steps_per_epoch=every,
            initial_epoch=done // every,
            verbose=0,
            callbacks=[
                *callbacks,
                tf.keras.callbacks.BackupAndRestore(
                    os.fspath(backup.folder), delete_checkpoint=False
                ),
                tf.keras.callbacks.LambdaCallback(
                    on_train_begin=lambda logs: workers.copy_from_chief(state),
                    on_batch_end=on_batch_end,
                ),
            ],
            **options,
        )


# -- Optimizer -------------------------------------------------------------------------


def learning_rate(peak: float, schedule: str, steps: int, warmup: int = 0) -> Any:
    """Returns the rate; "cosine" rises for a tenth of the steps, and falls to 1/20."""
    if schedule == "constant":
        return peak
    warmup = warmup or steps // 10
    return tf.keras.optimizers.schedules.CosineDecay(
        peak / max(1, warmup),  # the first step counts, too
        max(1, steps - warmup),
        alpha=0.05,
        warmup_target=peak,
        warmup_steps=warmup,
    )


def make_optimizer(s: Any) -> Any:
    """Returns the Keras optimizer of a stage's settings."""
    rate = learning_rate(s.learning_rate, s.schedule, s.steps)
    return optimizers.OPTIMIZERS[s.optimizer](rate)


def training_facts(s: Any, model: tf.keras.Model) -> dict[str, Any]:
    """Returns what a certificate tells of the training, apart from privacy."""
    names = ("optimizer", "learning_rate", "schedule", "engine")
    sizes = (np.prod(v.shape) for v in model.trainable_variables)
    return {
        **{name: getattr(s, name) for name in names},
        "trained_parameters": int(sum(sizes)),
        "starting_weights": s.init or "random",
        "weights": digest_of_weights(model.weights),
        "trained": list(s.trained),
        "computed_in": s.dtype,
        "products_of_clipping": fast.precision_in_words(s.jit_compile)
        if s.engine == "fast"
        else "as in tensorflow-privacy",
    }
