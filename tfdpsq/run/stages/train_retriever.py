r"""Train a two-tower retriever on pairs, with differential privacy if they are private.

    tfdpsq train_retriever --workdir=OUT --config.pairs=SET --config.init=T5

`method = "plain"` is ordinary training: free of privacy cost on synthetic and public
pairs, and without any guarantee on private ones. The other methods train directly on
private pairs by DP-SGD: "naive", "microbatch" and "public_negatives"; see
`tfdpsq.retriever.direct_dp`. `steps = 0` without `epochs` writes the untrained model.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfdpsq import privacy, retriever
from tfdpsq.layers import T5Config, train_only
from tfdpsq.privacy.plan import MOST_EPSILON
from tfdpsq.run.common import direct, hard_negatives, training
from tfdpsq.run.common.direct import PLAIN
from tfdpsq.run.common.kinds import MODEL
from tfdpsq.run.frame.places import Privacy
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import nested, setting
from tfdpsq.validation import InputError

_METHODS = retriever.METHODS  # those with a guarantee
_PLAIN = {"method": (PLAIN,)}
_PUBLIC_NEGATIVES = {"method": ("public_negatives",)}
_VALIDATION = "the retriever's hit rate on pairs held out of training"
# Settings that are those of `retriever.RetrieverConfig`.
_OF_MODEL = (
    "embedding_dim scale shared pooling bidirectional false_negatives query_length "
    "document_length"
).split()


class TrainRetriever(training.Training):
    """Trains a retriever, by Keras's `fit` or by DP-SGD."""

    name = "train_retriever"

    @dataclasses.dataclass(frozen=True)
    class Settings(training.ModelSettings):
        """Settings of `train_retriever`: the paper's values for a full-size T5."""

        epsilon: float = setting(math.inf, gt=0, le=MOST_EPSILON, inf=True)
        t5: Any = nested(
            training.T5Settings,
            num_layers=12,
            num_heads=12,
            hidden_dim=768,
            intermediate_dim=2048,
            when={"init": ("",)},
        )
        method: str = setting(PLAIN, choices=(PLAIN, *_METHODS))
        unsound: bool = setting(
            False,
            when={"method": ("naive",)},
            help="noise for batch_size times clip_norm, as in the paper: no guarantee",
        )
        embedding_dim: int = setting(768, ge=1, le=10**6)
        scale: float = setting(20.0, gt=0, le=1e6, help="of cosines")
        shared: bool = setting(True, help="one encoder for queries and documents")
        pooling: str = setting("mean", choices=("mean", "first"))
        bidirectional: bool = setting(False)
        false_negatives: bool = setting(
            False,
            when={"method": (PLAIN, "naive", "microbatch")},
            help="equal documents and known answers are negatives, as in the paper",
        )
        batch_size: int = setting(32, ge=1)
        rows_at_a_time: int = setting(
            0, ge=0, speed=True, when=_PLAIN, help="rows embedded; 0 is all"
        )
        validation_pairs: int = setting(
            128, ge=0, when=_PLAIN, help="held out; of private pairs a private read"
        )
        hard_negatives: Any = nested(hard_negatives.HardNegativesSettings)
        num_microbatches: int = setting(8, ge=1, when={"method": ("microbatch",)})
        negatives: int = setting(256, ge=1, when=_PUBLIC_NEGATIVES)
        refresh_every: int = setting(
            1, ge=1, le=10**9, when=_PUBLIC_NEGATIVES, help="steps"
        )
        microbatch_size: int = setting(
            32, ge=1, speed=True, when={"method": _METHODS}, help="rows in memory"
        )

    def check(self, s: Settings, given: Given) -> None:
        """Refuses what could not be certified, or would not train."""
        if not _trains(s):
            return
        training.require_steps(s)
        hard_negatives.check(s, given, protects=s.method != PLAIN)
        raw = given["pairs"].raw
        if s.method != PLAIN:
            if not raw:
                raise InputError(f"{s.pairs} has no private queries: use {PLAIN}.")
            direct.check(s)
            training.require_continuable(s, given)
            return
        if math.isfinite(s.epsilon) or s.unit == "user" or s.continues:
            raise InputError(
                f"method is {PLAIN!r}, which protects nobody, but epsilon is "
                f"{s.epsilon}, unit {s.unit!r} and continues {s.continues!r}. Set "
                f"method to one of {_METHODS}, or leave them out."
            )
        if raw and not s.n_is_public:
            raise InputError(
                f"method is {PLAIN!r} and the pairs are private: the certificate "
                "states their exact number. Set n_is_public to True."
            )

    def covered(self, s: Settings, given: Given) -> tuple[str, ...]:
        """Without training, pairs are not read and cost nothing."""
        if not _trains(s):
            return ("pairs", hard_negatives.RUN)
        return () if s.unsound else super().covered(s, given)

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

    def plan(self, c: Context) -> training.Planned:
        """See `Training.plan`."""
        units = training.units_of(c)
        s = training.with_steps(c.settings, units.n)
        return s, units, direct.plan_of(c, s, units)

    def run(self, c: Context) -> dict[str, Any]:
        """Makes the model, and trains it."""
        if not _trains(c.settings):
            _save(c, _untrained(c))
            return {"steps_executed": 0}
        mined = hard_negatives.origin(c)
        planned = s, units, plan = self.plan(c)
        if s.method == PLAIN:
            model = _untrained(c)
            direct.fit(c, s, model, units)
            result = {"steps_executed": s.steps}
        else:
            training.open_run(c, plan)
            model = _untrained(c)
            result = direct.train(c, planned, model)
        _save(c, model)
        if units.private:
            facts = training.training_facts(s, model)
            facts.update(direct.facts(s, model), hard_negatives=mined)
            how, method, own = "directly on private pairs", s.method, dict[str, Any]()
            if s.unsound:
                plan = privacy.make_plan(training.spec_of(s, units, epsilon=math.inf))
            if method == PLAIN or s.unsound:
                how, method = "on private pairs, unprotected", PLAIN
                own = {"run_id": None}
            training.certify(
                c,
                plan,
                result,
                facts,
                description=f"A two-tower retriever trained {how}.",
                sensitivity_argument=direct.ARGUMENTS[method].format(unit=s.unit),
                **own,
            )
        return result


def _save(c: Context, model: retriever.TwoTower) -> None:
    training.require_finite(model, c.settings)
    retriever.save(model, c.out / MODEL)


def _trains(s: Any) -> bool:
    return bool(s.steps or s.epochs)


def _untrained(c: Context) -> retriever.TwoTower:
    """Returns the retriever to start from: of `init`, or random by `t5`."""
    s, tokenizer = c.settings, training.tokenizer_of(c)
    tf.keras.utils.set_random_seed(s.seed)
    own = {name: getattr(s, name) for name in _OF_MODEL}
    with c.scope():
        if s.init:
            start = training.start_of(c)
            model = retriever.TwoTower.from_preset(start, tokenizer, s.dtype, **own)
        else:
            shape = retriever.RetrieverConfig(T5Config(**vars(s.t5)), **own)
            model = retriever.TwoTower(shape, tokenizer, s.dtype)
    tokenizer.require_embeddings(model.config.t5.vocabulary_size, bool(s.init))
    train_only(model, list(s.trained))
    return model


STAGE = TrainRetriever()
