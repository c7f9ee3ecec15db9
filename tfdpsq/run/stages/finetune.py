"""Fine-tune a T5 query generator with differential privacy.

    tfdpsq finetune --config=configs/finetune.py --workdir=DIR

A finite `epsilon` trains by DP-SGD; `epsilon = inf` takes the same steps without
clipping and noise. Writes the model, with its vocabulary, prompt and lengths, and
`certificate.json` where private pairs were read. What must never be released (training
curves, the key of the data's fingerprint) is in the private directory.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import tensorflow as tf

from tfdpsq import privacy
from tfdpsq.data import Tokenizer
from tfdpsq.data.tokenization import PROMPT
from tfdpsq.generator import Preprocessor, T5QueryGenerator
from tfdpsq.layers import T5Config, apply_lora, train_only
from tfdpsq.privacy.proof import budget
from tfdpsq.run.common import documents, training
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import Rule, nested, path, setting
from tfdpsq.validation import InputError, shown

_ARGUMENTS = {
    "query": "Each example is one query with its document, each query owns exactly one "
    "example, and an example's loss depends on that example alone. Its gradient is "
    "clipped to the clip norm, so adding or removing one query moves the sum by at "
    "most the clip norm.",
    "pair": "Each example is one pair, a query with one of its documents, and an "
    "example's loss depends on that example alone. Its gradient is clipped to the clip "
    "norm, so adding or removing one pair moves the sum by at most the clip norm, and "
    "adding or removing a query of k pairs by at most k clip norms.",
    "user": "Each query belongs to one user, and an example's loss depends on that "
    "example alone. The gradients of all examples that a step draws of one user are "
    "added up and clipped to the clip norm together, so adding or removing one user "
    "moves the sum by at most the clip norm.",
}


@dataclasses.dataclass(frozen=True)
class LoraSettings(settings.Settings):
    """A low-rank update of Dense layers; see `layers.apply_lora`."""

    rank: int = setting(0, ge=0, le=10**6, help="0 trains all weights")
    alpha: float = setting(16.0, gt=0, le=1e6, when="rank")
    targets: tuple[str, ...] = setting(
        ("*/query_projector", "*/value_projector"), of=Rule(), when="rank"
    )


class Finetune(training.Training):
    """Trains a T5 to write queries."""

    name = "finetune"

    @dataclasses.dataclass(frozen=True)
    class Settings(training.ModelSettings):
        """Settings of `finetune`: the paper's values for a full-size T5."""

        histogram: str = path(
            Artefact, "", help="of these pairs, whose cost counts within epsilon"
        )
        lora: Any = nested(LoraSettings)
        rematerialize: bool = setting(False, help="less memory, slower")
        prompt: str = setting(PROMPT, help='before every document; "" is none')
        bare: bool = setting(False, when="prompt", help="train without the prompt")
        batch_size: int = setting(1024, ge=1)
        microbatch_size: int = setting(16, ge=1, speed=True)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses what could not be certified, or would not train."""
        training.require_steps(s)
        training.require_continuable(s, given)
        if s.lora.rank and s.trained != ("*",):
            raise InputError(
                f"lora.rank is {s.lora.rank} and trained {list(s.trained)}, but LoRA "
                "trains its own weights alone. Leave out one of them."
            )

    def facts(self, s: Settings, given: Given) -> dict[str, Any]:
        """Facts that `audit` checks."""
        init = given["init"]
        return {
            "epsilon": settings.to_json(s.epsilon),
            "unit": s.unit,
            "split": s.split if given["pairs"].raw else "",
            "init": init.path if init else "",
        }

    def plan(self, c: Context) -> training.Planned:
        """See `Training.plan`."""
        assert c.devices is not None
        c.devices.require_share(c.settings.batch_size)
        units = training.units_of(c)
        s = training.with_steps(c.settings, units.n)
        spec = training.spec_of(s, units)
        histogram = c.given["histogram"]
        if histogram is None:
            return s, units, privacy.make_plan(spec)
        # What both cost stays within epsilon.
        return s, units, budget.plan_within(spec, training.runs_of(histogram))

    def run(self, c: Context) -> dict[str, Any]:
        """Plans, pays, trains, and writes the generator."""
        if c.given["histogram"] is not None:
            # Counts that synthesis cannot use would waste the budget.
            documents.Histogram.load(c.given["histogram"].path).rates(1, 0)
        planned = s, units, plan = self.plan(c)
        preprocessor = _preprocessor(c)
        trained = copy.copy(preprocessor)
        trained.prompt = "" if s.bare else s.prompt
        training.open_run(c, plan)
        with c.scope():
            model = _load_generator(c, preprocessor.tokenizer)
            optimizer = training.make_optimizer(s)
        stored = training.stored_rows(c, units.rows.read(), trained.arrays)
        result = training.train(
            c,
            planned,
            model,
            lambda batch: model.per_example_losses(batch, training=True),
            optimizer,
            stored.take,
            s.microbatch_size,
            layers=[model],
            engine=s.engine,
        )
        model.preprocessor = preprocessor
        model.save_to_huggingface(c.out)
        if units.private:
            lora = settings.to_json(s.lora) if s.lora.rank else "none"
            facts = {**training.training_facts(s, model), "lora": lora}
            training.certify(
                c,
                plan,
                result,
                facts,
                description="A T5 generator fine-tuned to write queries from "
                "documents.",
                sensitivity_argument=_ARGUMENTS[s.unit],
            )
        return result


def _preprocessor(c: Context) -> Preprocessor:
    """Returns prompt, vocabulary and lengths, if the prompt leaves tokens to texts."""
    s, tokenizer = c.settings, training.tokenizer_of(c)
    training.require_characters(c, tokenizer)
    _, (tokens,) = tokenizer.encode([s.prompt], s.document_length)
    if tokens >= s.document_length:
        raise InputError(
            f"document_length is {s.document_length} tokens, which the prompt "
            f"{shown(s.prompt)} fills. Raise document_length, or shorten prompt."
        )
    return Preprocessor(tokenizer, s.prompt, s.document_length, s.query_length)


def _load_generator(c: Context, tokenizer: Tokenizer) -> T5QueryGenerator:
    """Returns the generator to start from, with its trained weights chosen."""
    s, init = c.settings, c.given["init"]
    tf.keras.utils.set_random_seed(s.seed)
    options = (s.dtype, s.rematerialize)
    if init is not None:
        model = T5QueryGenerator.from_preset(init.path, *options)
    else:
        model = T5QueryGenerator(T5Config(**vars(s.t5)), *options)
    tokenizer.require_embeddings(model.config.vocabulary_size, init is not None)
    if s.lora.rank:
        apply_lora(model, s.lora.rank, s.lora.alpha, list(s.lora.targets))
    else:
        train_only(model, list(s.trained))
    return model


STAGE = Finetune()
