"""What the stages that train have in common: settings, units, and a paid run.

A private run is paid for in this order: the number of units is declared, the plan made,
composed with the releases that it follows and with those that `--budget` counts, and
the run's directory opened; then `privacy.train` pays for each step before it is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdpsq import privacy
from tfdpsq.data import Pair, RowStore, write_rows
from tfdpsq.data.tokenization import CHUNK
from tfdpsq.privacy import checkpoint, fast, optimizers, spec, workers
from tfdpsq.privacy.plan import MOST_EPSILON
from tfdpsq.privacy.proof import budget
from tfdpsq.privacy.proof.certificate import verified_runs
from tfdpsq.privacy.randomness import secure
from tfdpsq.privacy.training import digest_of_weights
from tfdpsq.run.frame import records, runs, settings
from tfdpsq.run.frame.artefacts import Artefact, Rows
from tfdpsq.run.frame.places import Privacy, open_private
from tfdpsq.run.frame.progress import Progress
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import nested, setting
from tfdpsq.validation import InputError

LOSS_READ = {
    "what": "the training loss of every step, averaged over its batch, and how long "
    "the step took",
    "where": "the terminal, and logs/ under private/",
}
COMPOSED = "composed"
_T5X = "t5x_adafactor"
# Inputs that are private queries in one form or another.
_PROTECTED = ("pairs", "hard_negatives.run", "queries")


# -- Settings --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class UnitSettings(settings.Settings):
    """Settings of any private release; see `PrivacySpec`."""

    delta: float = setting(0.0, ge=0, lt=1, help="0 is 1/(2n)")
    accountant: str = setting("pld", choices=spec.ACCOUNTANTS)
    unit: str = setting(
        "query",
        choices=spec.UNITS,
        help="query: with one document; pair: the paper's, and weaker, as a query of "
        "k pairs is k units; user: whoever user_field names",
    )
    user_field: str = setting(
        "user_id", when={"unit": ("user",)}, help="metadata field of queries.jsonl"
    )
    rows_per_unit: int = setting(1, ge=1, when={"unit": ("user",)})
    n_is_public: bool = setting(
        False, help="declares that the exact number of units may be published"
    )
    n_bound: int = setting(0, ge=0, le=10**15, help="else a public bound on it")
    secure: bool = setting(
        False, help="cryptographic draws, and noise that is safe in floating point"
    )
    strict: bool = setting(False, help="leave out or refuse reads that no ε covers")


@dataclasses.dataclass(frozen=True)
class PrivacySettings(UnitSettings):
    """Settings of a private training run; without an ε, most do nothing."""

    epsilon: float = setting(
        8.0, gt=0, le=MOST_EPSILON, inf=True, help="inf trains without privacy"
    )
    clip_norm: float = setting(0.1, gt=0, le=1e6)
    sampler: str = setting("poisson", choices=spec.SAMPLERS)
    engine: str = setting("fast", choices=spec.ENGINES)
    save_every: int = setting(
        50, ge=1, le=10**9, speed=True, help="most steps that a kill can lose"
    )


@dataclasses.dataclass(frozen=True)
class StepsSettings(settings.Settings):
    """The length of training, in steps or in epochs of units."""

    steps: int = setting(1000, ge=0, le=10**9)
    epochs: float = setting(0.0, ge=0, le=1e6, help="instead of steps, which are 0")


@dataclasses.dataclass(frozen=True)
class T5XAdafactorSettings(settings.Settings):
    """Settings of `privacy.adafactor`, by T5X's names."""

    multiply_by_parameter_scale: bool = setting(True)
    decay_rate: float = setting(0.8, gt=0, le=10)
    clipping_threshold: float = setting(1.0, ge=0, le=1e6, help="0 clips nothing")
    min_dim_size_to_factor: int = setting(128, ge=1)
    epsilon1: float = setting(1e-30, ge=1e-37, le=1)
    epsilon2: float = setting(1e-3, ge=0, le=1e3, when="multiply_by_parameter_scale")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(settings.Settings):
    """The optimizer and its rate; "cosine" rises for a tenth of the steps."""

    optimizer: str = setting("adam", choices=spec.OPTIMIZERS)
    learning_rate: float = setting(1e-3, gt=0, le=1e3)
    schedule: str = setting("constant", choices=("constant", "cosine"))
    t5x_adafactor: Any = nested(T5XAdafactorSettings, when={"optimizer": (_T5X,)})


@dataclasses.dataclass(frozen=True)
class StartSettings(settings.Settings):
    """How a run on new pairs relates to the runs that `init` came from."""

    continues: str = setting(
        "",
        choices=("", COMPOSED, *budget.DISJOINT),
        help="composed: all runs count together; time, user: declares that no query, "
        "or no user, of these pairs was among theirs, so that the largest epsilon "
        "holds; '' refuses weights that were trained on private queries",
    )


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


DTYPES = ("float32", "mixed_bfloat16")


# -- What the runner asks of a stage that trains ---------------------------------------


class Training(Stage):
    """A stage that trains on `pairs`, under a guarantee where `epsilon` is finite."""

    strategies = ("default", "mirrored", "tpu", "multiworker")
    spends = True

    def covered(self, s: Any, given: Given) -> tuple[str, ...]:
        """A finite ε protects private pairs, and what was made of each by itself."""
        if not given["pairs"].raw or math.isinf(s.epsilon):
            return ()
        return tuple(name for name in _PROTECTED if given.get(name) is not None)

    def reads(self, s: Any, given: Given) -> list[tuple[str, str]]:
        """Losses are shown; strict mode leaves them out."""
        if s.strict or not given["pairs"].raw:
            return []
        return [(LOSS_READ["what"], LOSS_READ["where"])]

    def require_sound(self, s: Any, record: Mapping[str, Any]) -> None:
        """Refuses weights of a training that diverged, once they are saved.

        They stay, with the certificate of what was paid.
        """
        if "diverged" in record["result"]:
            own = "in a run of its own: its budget adds up with this one's."
            if math.isinf(s.epsilon):
                own = "and move this one away: it has no epsilon, and cost no budget."
            rate = self.rate_setting(s)
            raise InputError(
                f"{record['result']['diverged']} They are kept, with the certificate "
                f"of what was paid. Lower {rate} (now {getattr(s, rate)}) {own}"
            )

    def rate_setting(self, s: Any) -> str:
        """Returns the name of the setting that has the learning rate."""
        return "learning_rate"


def require_steps(s: Any) -> None:
    """Refuses steps and epochs together, and neither of them."""
    if s.epochs and s.steps:
        raise InputError(
            f"epochs is {s.epochs} and steps {s.steps}: one of them decides how long "
            "to train. Set steps to 0 to train for epochs, or epochs to 0."
        )
    if not s.epochs and not s.steps:
        raise InputError(
            "steps and epochs are 0: nothing would be trained. Set one of them."
        )


def require_continuable(s: Any, given: Given) -> None:
    """Refuses starting weights and a histogram that do not fit `continues`.

    Raises:
      InputError: private weights without `continues`; or that, or a histogram, without
        private weights to continue or without a finite ε.
    """
    init, histogram = given.get("init"), given.get("histogram")
    private = math.isfinite(s.epsilon) and given["pairs"].raw
    if histogram is not None and (s.continues or not private):
        raise InputError(
            f"histogram is {histogram.path}, whose cost counts within a finite epsilon "
            f"of a run from public weights, but epsilon is {s.epsilon} and continues "
            f"{s.continues!r}. Leave histogram out."
        )
    if math.isfinite(s.epsilon) and not given["pairs"].raw:
        raise InputError(
            f"{given['pairs'].path} is a synthetic or public set, yet epsilon is "
            f"{s.epsilon}. One private query can have had a part in all of its rows, "
            'so noise now would certify nothing: set epsilon to "inf". The result has '
            "the guarantee of the set."
        )
    follows = init is not None and init.privacy > Privacy.PUBLIC
    if s.continues and not follows:
        raise InputError(
            f"continues is {s.continues!r}, but init ({init and init.path!r}) has no "
            "certificate: no private run is continued. Leave continues out."
        )
    if s.continues and math.isinf(s.epsilon):
        raise InputError(
            f"continues is {s.continues!r} and epsilon {s.epsilon}: nothing would be "
            "guaranteed. Leave continues out, or give a finite epsilon."
        )
    if private and follows and not s.continues:
        raise InputError(
            f"init is {init.path}, which was itself trained on private queries: "
            f"epsilon {s.epsilon} would not be all that was spent. Start from public "
            "weights, or set continues: 'composed' counts all runs together; 'time' or "
            "'user' declares that these pairs share no query, or no user, with the "
            "earlier ones."
        )


# -- Units and plan --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Units:
    """The units that the guarantee protects.

    Attributes:
      rows: the pairs to train on.
      count: number of units in the data; private unless declared otherwise.
      groups: maps pairs to their users, for unit "user".
      private: whether these are private pairs.
    """

    rows: Rows
    count: int
    groups: privacy.Groups | None
    private: bool


def units_of(pairs: Artefact, s: Any) -> Units:
    """Returns the units of the pairs to train on.

    Raises:
      DataError: a query without the user field, for unit "user".
    """
    rows = pairs.load(s.split, s.unit)  # type: ignore[attr-defined]
    if s.unit != "user" or rows.table is None:
        return Units(rows, rows.count, None, rows.table is not None)
    owners = pairs.beir().owners(rows.table, s.user_field)  # type: ignore[attr-defined]
    groups = privacy.Groups.of(owners)
    return Units(rows, len(groups), groups, True)


def declared_n(
    count: int, n_is_public: bool, n_bound: int, unit: str
) -> tuple[int, bool]:
    """Returns the n that may be published, and whether it is the exact number.

    Raises:
      InputError: nothing was declared, both were, or `count` exceeds the bound.
    """
    if n_is_public:
        if n_bound:
            raise InputError(
                f"n_is_public is True and n_bound is {n_bound}: declare either "
                "that the exact number of units is public, or a bound on it."
            )
        return count, True
    if not n_bound:
        raise InputError(
            f"the number of units is treated as public only when declared, and delta "
            f"and the sampling probability depend on it. Set n_is_public = True if "
            f"the number of {unit} units may be published, or n_bound to a "
            "public upper bound on it."
        )
    if count > n_bound:
        raise InputError(
            f"n_bound is {n_bound}, but the data hold more units than that. "
            "Declare a larger bound."
        )
    return n_bound, False


def public_n(s: Any, units: Units) -> tuple[int, bool]:
    """Returns the n that may be published, as `declared_n`; of a set its count."""
    if not units.private:
        return units.count, True
    return declared_n(units.count, s.n_is_public, s.n_bound, s.unit)


def with_steps(s: Any, n: int) -> Any:
    """Returns settings with the steps that their epochs take, of n units.

    An epoch of shuffled batches leaves out what fills no batch: a step more would cost
    what a whole epoch costs.
    """
    if not s.epochs:
        return s
    shuffled = s.sampler == "shuffled"
    epoch = n // s.batch_size if shuffled else n / s.batch_size
    return dataclasses.replace(s, steps=max(1, round(s.epochs * epoch)), epochs=0.0)


def spec_of(s: Any, units: Units, **changes: Any) -> privacy.PrivacySpec:
    """Returns the spec of settings with steps.

    Args:
      s: of the stage.
      units: of its pairs.
      **changes: fields of the spec that the stage sets itself.

    Raises:
      InputError: n was not declared, or what `PrivacySpec` raises.
    """
    if s.secure:
        secure.require()
    n, public = public_n(s, units)
    names = "epsilon clip_norm accountant sampler unit rows_per_unit secure".split()
    fields = {name: getattr(s, name) for name in names if name not in changes}
    fields["delta"] = (s.delta or None) if math.isfinite(s.epsilon) else None
    for name in {"batch_size", "steps"} - changes.keys():
        fields[name] = getattr(s, name)
    return privacy.PrivacySpec(num_units=n, n_is_public=public, **fields, **changes)


def make_plan(c: Context, own: privacy.PrivacySpec) -> privacy.PrivacyPlan:
    """Returns the plan of a run, which with its histogram stays within the spec's ε.

    Raises:
      InputError: the histogram's certificate does not hold, or it cost above 5 %.
    """
    histogram = c.given.get("histogram")
    if histogram is None:
        return privacy.make_plan(own)
    return budget.plan_within(own, _runs_of(histogram))


# -- The run ---------------------------------------------------------------------------


def _earlier(c: Context) -> tuple[Artefact | None, str | None]:
    """Returns the release that a run follows, and how their logs are disjoint."""
    continues = getattr(c.settings, "continues", "")
    if not continues:
        return c.given.get("histogram"), None
    return c.given["init"], None if continues == COMPOSED else continues


def _runs_of(artefact: Artefact) -> list[budget.Run]:
    if artefact.certificate is None:
        raise InputError(
            f"{artefact.path} has no certificate of a finite epsilon. Leave it out."
        )
    return verified_runs(artefact.certificate, f"the certificate of {artefact.path}")


@contextlib.contextmanager
def paying(c: Context, plan: privacy.PrivacyPlan) -> Iterator[None]:
    """Checks what a run adds to earlier ones, and opens its directory, `c.place.run`.

    Raises:
      InputError: they cannot be composed, the total would exceed `--budget`, or the
        directory holds the paid steps of another run.
    """
    before, disjoint = _earlier(c)
    earlier = [] if before is None else _runs_of(before)
    own = budget.follow(plan, plan.spec.steps, c.inputs["pairs"], earlier, disjoint)
    planned = [dataclasses.replace(own, key=f"planned {c.place.name}"), *earlier]
    if earlier:
        total = budget.compose(budget.sharing(planned))  # before anything is spent
        rdp = plan.spec.accountant == "rdp"
        logging.info(
            "%s: with what was released before, epsilon is %.4g at delta %.3g",
            c.place.name,
            total.epsilon_rdp if rdp else total.epsilon_pld,
            total.delta,
        )
    with contextlib.ExitStack() as stack:
        if c.budget is not None and not c.given["pairs"].facts.get("canaries"):
            stack.enter_context(c.budget.spending(c.place, planned))
        runs.open_run(c)
        yield


def stored_rows(
    c: Context,
    pairs: Iterator[Pair],
    encode: Callable[[list[Pair]], Mapping[str, np.ndarray]],
) -> RowStore:
    """Returns the pairs as rows on disk, beside the run's state.

    Training reads one batch at a time. `encode` tokenises some pairs; field ->
    [pairs, ...].
    """
    path = c.place.run / checkpoint.STATE / "rows"
    if path.is_dir():  # left by a run that was killed
        store = RowStore(path)
        store.verify()
        return store
    chunks = iter(lambda: list(itertools.islice(pairs, CHUNK)), [])
    return write_rows(path, map(encode, chunks))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a training run ended.

    Attributes:
      paid: steps paid for, which the certificate counts.
      diverged: what to say of weights that were not finite; "" if they were.
    """

    paid: int
    diverged: str = ""

    def recorded(self) -> dict[str, Any]:
        """Returns the divergence, if any, for `stage.json` and the certificate."""
        return {"diverged": self.diverged} if self.diverged else {}


def train(
    c: Context,
    s: Any,
    model: tf.keras.Model,
    plan: privacy.PrivacyPlan,
    losses: Callable,
    optimizer: Any,
    take: Callable,
    units: Units,
    *,
    microbatch_size: int,
    tokens: int = 0,
    **options: Any,
) -> Outcome:
    """Calls `privacy.train` in the run that `paying` opened; shows its progress.

    Model and optimizer were made in `c.scope()`.

    Args:
      c: of the stage.
      s: its settings, with steps.
      model: what is trained.
      plan: of the run.
      losses: per-example losses of a batch.
      optimizer: a new one.
      take: reads rows by number.
      units: of the pairs.
      microbatch_size: rows differentiated at a time.
      tokens: of one example, padding included.
      **options: further arguments of `privacy.train`.

    Raises:
      Preempted: the process, or another worker, received a signal to end.
      InputError: what `privacy.train` raises.
    """
    assert c.devices is not None
    progress = Progress(
        c.place.logs,
        plan.spec.steps,
        measured=not s.strict,
        batch_size=plan.spec.batch_size,
        tokens=tokens,
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
                **options,
            )
        except privacy.Diverged as error:
            return Outcome(
                error.paid,
                f"training diverged at step {error.diverged_at}: these are the weights "
                f"of step {error.weights_of}. All {error.paid} steps of the plan are "
                "paid for and counted, taken or not.",
            )
    return Outcome(paid)


def certificate_of(
    c: Context, plan: privacy.PrivacyPlan, paid: int, **stated: Any
) -> dict[str, Any]:
    """Returns the certificate of a run on private pairs, and of what it follows.

    It lists all private reads of the workdir so far: earlier ones may have influenced
    this run's settings.

    Args:
      c: of the stage.
      plan: of the run.
      paid: logical steps that were paid.
      **stated: other attributes of `Certificate`; "fingerprints" are added to those of
        the inputs and the code; "run_id" is `None` for what has no ledger.
    """
    assert c.devices is not None
    before, disjoint = _earlier(c)
    added = stated.pop("fingerprints", {})
    if "run_id" not in stated:
        # Only the chief of several workers has the ledger, and keeps the output.
        stated["run_id"] = runs.run_id(c.place) if c.devices.chief else None
    return privacy.make_certificate(
        plan,
        paid,
        earlier=None if before is None else before.certificate,
        disjoint=disjoint,
        fingerprints={**c.inputs, **added, "code": privacy.code_fingerprint()},
        private_reads=records.private_reads(c.place.private).entries,
        **stated,
    )


# -- Training by `fit`, without a guarantee --------------------------------------------


def open_backup(c: Context, per_epoch: int) -> tuple[pathlib.Path, int]:
    """Opens the directory of a run's backups; the runner removes it at the end.

    A backup of other settings or inputs is not taken up.

    Args:
      c: of the stage.
      per_epoch: steps of an epoch, after which `BackupAndRestore` saves.

    Returns:
      The directory, and the epochs that the chief's backup there has finished. Keras
      restores the number, and starts the data at their beginning.
    """
    own = records.digest([c.depends, per_epoch])[:16]
    backup = open_private(c.place.run / "backup" / own)
    latest = tf.train.latest_checkpoint(os.fspath(backup / "chief"))
    epochs = 0
    if latest is not None:
        name = "ckpt_saved_epoch/.ATTRIBUTES/VARIABLE_VALUE"
        epochs = int(tf.train.load_variable(latest, name)) + 1
    with c.scope():
        return backup, workers.chiefs_number(epochs)


class Steps(tf.keras.callbacks.Callback):
    """Shows every step of `fit`; ends it after the last one, or on a signal."""

    def __init__(
        self,
        progress: Progress,
        steps: int,
        done: int,
        asked: Callable[[], bool],
        state: Sequence[tf.Variable],
    ):
        """Takes the numbers of all steps and of those done, and what a backup holds."""
        super().__init__()
        self._progress, self._asked, self._state = progress, asked, state
        self._steps, self._done = steps, done

    def on_train_begin(self, logs: Any = None) -> None:
        """Gives the chief's backup to the other workers; it alone has restored one."""
        workers.copy_from_chief(self._state)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Raises `Preempted` if any worker was asked to end."""
        self._done += 1
        self._progress(self._done, logs["loss"])
        if self._done >= self._steps:
            self.model.stop_training = True
        elif any(workers.any_of(self._asked())):
            raise privacy.Preempted(self._done)


# -- Optimizer -------------------------------------------------------------------------


def learning_rate(peak: float, schedule: str, steps: int) -> Any:
    """Returns the rate, or its schedule over all steps.

    Schedule "cosine" rises over the first tenth of the steps and falls to a twentieth.
    """
    if schedule == "constant":
        return peak
    return cosine_decay(peak, steps // 10, steps)


def cosine_decay(
    peak: float, warmup: int, steps: int
) -> tf.keras.optimizers.schedules.LearningRateSchedule:
    """Returns a rate that rises for `warmup` steps, and falls to a twentieth."""
    return tf.keras.optimizers.schedules.CosineDecay(
        # The first step counts, too.
        peak / max(1, warmup),
        max(1, steps - warmup),
        alpha=0.05,
        warmup_target=peak,
        warmup_steps=warmup,
    )


def make_optimizer(s: Any) -> Any:
    """Returns the Keras optimizer of a stage's settings."""
    options: dict[str, Any] = {}
    if s.optimizer == _T5X:
        options = dict(vars(s.t5x_adafactor))
        options["clipping_threshold"] = options["clipping_threshold"] or None
    rate = learning_rate(s.learning_rate, s.schedule, s.steps)
    return optimizers.OPTIMIZERS[s.optimizer](rate, **options)


def training_facts(s: Any, model: tf.keras.Model) -> dict[str, Any]:
    """Returns what a certificate tells of the training, apart from privacy."""
    return {
        "optimizer": s.optimizer,
        "learning_rate": s.learning_rate,
        "schedule": s.schedule,
        "engine": s.engine,
        "trained_parameters": int(
            sum(np.prod(v.shape) for v in model.trainable_variables)
        ),
        "starting_weights": s.init or "random",
        "weights": digest_of_weights(model.weights),
        "trained": list(s.trained),
        "computed_in": s.dtype,
        "products_of_clipping": fast.precision_in_words(s.jit_compile)
        if s.engine == "fast"
        else "as in tensorflow-privacy",
    }
