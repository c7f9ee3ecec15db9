r"""Train a two-tower retriever on pairs, with differential privacy if they are private.

    tfdpsq train_retriever --workdir=OUT --config.pairs=SET --config.init=T5

`method = "plain"` is ordinary training: free of privacy cost on synthetic and public
pairs, and without any guarantee on private ones. The other methods train directly on
private pairs by DP-SGD: "naive", "microbatch" and "public_negatives"; see
`tfdpsq.retriever.direct_dp`. `steps = 0` without `epochs` writes the untrained model.

All methods stream their pairs, tokenised, to disk, four bytes for each of a row's
`query_length + document_length` tokens, and read them a batch at a time: sets may have
any size.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq import privacy, retriever
from tfdpsq.data import Tokenizer
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.generator import checkpoints
from tfdpsq.layers import T5Config, train_only
from tfdpsq.privacy.plan import MOST_EPSILON
from tfdpsq.run.common import direct, hard_negatives, training
from tfdpsq.run.common.direct import PLAIN
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.artefacts import MODEL, File, Generator, Pairs, Retriever
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import Rule, nested, path, setting
from tfdpsq.validation import InputError

_METHODS = retriever.METHODS  # those with a guarantee
_VALIDATION = "the retriever's hit rate on pairs held out of training"
# Settings that are those of `retriever.RetrieverConfig`.
_OF_MODEL = (
    "embedding_dim scale learned_scale shared pooling bidirectional false_negatives "
    "query_length document_length"
).split()


class TrainRetriever(training.Training):
    """Trains a retriever, by Keras's `fit` or by DP-SGD."""

    name, kind = "train_retriever", Retriever

    @dataclasses.dataclass(frozen=True)
    class Settings(
        training.OptimizerSettings,
        training.StepsSettings,
        training.StartSettings,
        training.PrivacySettings,
    ):
        """Settings of `train_retriever`: the paper's values for a full-size T5."""

        epsilon: float = setting(math.inf, gt=0, le=MOST_EPSILON, inf=True)
        pairs: str = path(Pairs, "pydocs")
        split: str = setting("train")
        init: str = path(
            Generator, "", help="or a retriever; '' starts from random weights, by t5"
        )
        vocabulary: str = path(File, "", when={"init": ("",)})
        t5: Any = nested(
            training.T5Settings,
            num_layers=12,
            num_heads=12,
            hidden_dim=768,
            intermediate_dim=2048,
            when={"init": ("",)},
        )
        trained: tuple[str, ...] = setting(
            ("*",),
            of=Rule(),
            help='patterns of paths: ("query_tower/*",) with shared = False freezes '
            "the documents' embeddings, so that an index of them stays valid",
        )
        method: str = setting(PLAIN, choices=(PLAIN, *_METHODS))
        embedding_dim: int = setting(768, ge=1, le=10**6)
        scale: float = setting(20.0, gt=0, le=1e6, help="of cosines")
        learned_scale: bool = setting(False)
        shared: bool = setting(True, help="one encoder for queries and documents")
        pooling: str = setting("mean", choices=("mean", "first"))
        bidirectional: bool = setting(False)
        false_negatives: bool = setting(
            False,
            when={"method": (PLAIN, "naive", "microbatch")},
            help="equal documents and other known answers count as negatives, as in "
            "equation (1) of the paper",
        )
        document_length: int = setting(384, ge=2, le=10**6, help="tokens, end included")
        query_length: int = setting(128, ge=2, le=10**6)
        batch_size: int = setting(32, ge=1)
        dtype: str = setting("float32", choices=training.DTYPES)
        rows_at_a_time: int = setting(
            0,
            ge=0,
            speed=True,
            when={"method": (PLAIN,)},
            help="rows embedded at a time where a batch exceeds memory; 0 is all",
        )
        validation_pairs: int = setting(
            128,
            ge=0,
            when={"method": (PLAIN,)},
            help="held out, at most a twentieth, and searched for every save_every "
            "steps; of private pairs a private read",
        )
        hard_negatives: Any = nested(hard_negatives.HardNegativesSettings)
        num_microbatches: int = setting(
            8, ge=1, when={"method": ("microbatch",)}, help="groups of a step"
        )
        negatives: int = setting(
            256, ge=1, when={"method": ("public_negatives",)}, help="of a step, public"
        )
        refresh_every: int = setting(
            1, ge=1, le=10**9, when={"method": ("public_negatives",)}, help="steps"
        )
        most_documents: int = setting(
            100_000,
            ge=1,
            when={"method": ("public_negatives",)},
            help="that negatives are drawn from, evenly spread over the corpus",
        )
        microbatch_size: int = setting(
            32,
            ge=1,
            speed=True,
            when={"method": _METHODS},
            help="rows in memory at a time; whole groups; of naive, documents",
        )
        jit_compile: bool = setting(False)
        seed: int = setting(0, ge=0, le=settings.SEED)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses what could not be certified, or would not train."""
        if given["init"] is None and given["vocabulary"] is None:
            raise InputError(
                "init is '', and no vocabulary was given. Set vocabulary to the "
                f"{VOCABULARY_FILE} that prepare wrote, or init to a T5 with its own."
            )
        if not _trains(s):
            return
        training.require_steps(s)
        hard_negatives.check(s, given, protects=s.method != PLAIN)
        if s.method == PLAIN:
            self._check_plain(s, given)
            return
        if not given["pairs"].raw:
            raise InputError(
                f"{s.pairs} holds no private queries: use method {PLAIN!r}."
            )
        direct.check(s)
        training.require_continuable(s, given)

    def _check_plain(self, s: Settings, given: Given) -> None:
        if math.isfinite(s.epsilon):
            raise InputError(
                f"epsilon is {s.epsilon} but method {PLAIN!r} adds no noise. Set "
                f'epsilon to "inf", or method to one of {_METHODS}.'
            )
        if s.unit == "user" or s.continues:
            name = "unit" if s.unit == "user" else "continues"
            raise InputError(
                f"{name} is {getattr(s, name)!r}, but method {PLAIN!r} protects "
                "nobody. Leave it out, or use another method."
            )
        if given["pairs"].raw and not s.n_is_public:
            raise InputError(
                f"method is {PLAIN!r} and the pairs are private: the certificate, "
                "which says that nothing is protected, states their exact number. Set "
                "n_is_public = True."
            )

    def covered(self, s: Settings, given: Given) -> tuple[str, ...]:
        """What is not read costs nothing."""
        if not _trains(s):
            return ("pairs", hard_negatives.RUN)
        return super().covered(s, given)

    def privacy(self, s: Settings, given: Given) -> Privacy:
        """Untrained, it is what `init` is."""
        if not _trains(s):
            return given.privacy(self.covered(s, given))
        return super().privacy(s, given)

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """Losses, and the hit rate of pairs that are held out."""
        found = super().reads(s, given) if _trains(s) else []
        if found and s.method == PLAIN and s.validation_pairs:
            found.append((_VALIDATION, "logs/ under private/"))
        return found

    def run(self, c: Context) -> dict[str, Any]:
        """Makes the model, and trains it."""
        s, outcome = c.settings, training.Outcome(0)
        tokenizer = _tokenizer(c)
        certificate = self.certificate(s, c.given)
        if not _trains(s):
            with c.scope():
                model = _untrained(c, tokenizer)
        else:
            units = training.units_of(c.given["pairs"], s)
            c.counts["units"] = units.count
            s = training.with_steps(s, training.public_n(s, units)[0])
            mined = hard_negatives.origin(c)
            if s.method == PLAIN:
                with c.scope():
                    model = _untrained(c, tokenizer)
                direct.fit(c, s, model, tokenizer, units)
                outcome = training.Outcome(s.steps)
                plan = _unprotected(s, units.count)
            else:
                plan = direct.plan_of(c, s, units)
                with training.paying(c, plan):
                    with c.scope():
                        model = _untrained(c, tokenizer)
                    outcome = direct.train(c, s, model, tokenizer, units, plan)
            if units.private:
                facts = training.training_facts(s, model)
                facts.update(direct.facts(s, model), hard_negatives=mined)
                facts.update(outcome.recorded())
                certificate = _certificate(c, plan, outcome.paid, facts)
        if not all(np.isfinite(v.numpy()).all() for v in model.trainable_variables):
            raise InputError(
                "training diverged: the weights hold NaN or infinity. Lower "
                f"learning_rate (now {s.learning_rate})."
            )
        retriever.save(model, c.out / MODEL)
        records.write_certificate(c.out, certificate)
        return {"steps_executed": outcome.paid, **outcome.recorded()}


def _trains(s: Any) -> bool:
    return bool(s.steps or s.epochs)


def _start(c: Context) -> str:
    """Returns the directory of the starting weights."""
    inside = f"{c.given['init'].path}/{MODEL}"
    return inside if os.path.isdir(inside) else c.given["init"].path


def _tokenizer(c: Context) -> Tokenizer:
    """Returns the vocabulary: that of `init`, or the one given.

    Raises:
      InputError: `init` has none.
    """
    if c.given["init"] is None:
        return Tokenizer(c.given["vocabulary"].path)
    found = checkpoints.vocabulary_in(_start(c))
    if found is None:
        raise InputError(
            f"init is {c.settings.init}, which has no {VOCABULARY_FILE}. Put its "
            "vocabulary there, or convert it with one."
        )
    return Tokenizer(found)


def _untrained(c: Context, tokenizer: Tokenizer) -> retriever.TwoTower:
    """Returns the retriever to start from: of `init`, or random by `t5`."""
    s = c.settings
    tf.keras.utils.set_random_seed(s.seed)
    own = {name: getattr(s, name) for name in _OF_MODEL}
    if c.given["init"] is not None:
        model = retriever.TwoTower.from_preset(_start(c), tokenizer, s.dtype, **own)
    else:
        shape = retriever.RetrieverConfig(T5Config(**vars(s.t5)), **own)
        model = retriever.TwoTower(shape, tokenizer, s.dtype)
    size = model.config.t5.vocabulary_size
    tokenizer.require_embeddings(size, c.given["init"] is not None)
    train_only(model, list(s.trained))
    if s.learned_scale and not model.scaled.trainable_weights:
        raise InputError(
            f"learned_scale is True, but trained is {list(s.trained)}, without the "
            "scale. Add 'scale/*', or set learned_scale to False."
        )
    return model


def _unprotected(s: Any, n: int) -> privacy.PrivacyPlan:
    """Returns the plan of ordinary training: no guarantee."""
    return privacy.make_plan(
        privacy.PrivacySpec(
            epsilon=math.inf,
            clip_norm=s.clip_norm,
            num_units=n,
            n_is_public=True,
            batch_size=s.batch_size,
            steps=s.steps,
            unit=s.unit,
            sampler="shuffled",
        )
    )


def _certificate(
    c: Context, plan: privacy.PrivacyPlan, paid: int, facts: dict[str, Any]
) -> dict[str, Any]:
    """Returns the certificate of training on private pairs."""
    s = c.settings
    own: dict[str, Any] = {}
    if s.method == PLAIN:
        about = "A two-tower retriever trained on private pairs, unprotected."
        argument = "None: nothing is clipped and no noise is added."
        own["run_id"] = None  # it has no ledger
    else:
        about = "A two-tower retriever trained directly on private pairs."
        argument = direct.ARGUMENTS[s.method].format(unit=s.unit)
    return training.certificate_of(
        c,
        plan,
        paid,
        description=about,
        sensitivity_argument=argument,
        training=facts,
        **own,
    )


STAGE = TrainRetriever()
