"""Fine-tune a T5 query generator with differential privacy.

    tfdpsq finetune --config=configs/finetune.py --workdir=DIR

A finite `epsilon` trains by DP-SGD; `epsilon = inf` takes the same steps without
clipping and noise. Writes the model, with its vocabulary, prompt and lengths, and
`certificate.json` where private pairs were read. What must never be released (training
curves, the key of the data's fingerprint) is in the private directory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpsq.data import Tokenizer
from tfdpsq.data.tokenization import PROMPT, VOCABULARY_FILE
from tfdpsq.generator import Preprocessor, T5QueryGenerator, checkpoints
from tfdpsq.layers import T5Config, apply_lora, train_only
from tfdpsq.privacy import batches
from tfdpsq.privacy import plan as plans
from tfdpsq.run.common import documents, training
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.artefacts import File, Generator, Histogram, Pairs
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import Rule, nested, path, setting
from tfdpsq.validation import InputError, shown

SENSITIVITY_ARGUMENTS = {
    "query": (
        "Each example is one query with its document, each query owns exactly one "
        "example, and an example's loss depends on that example alone. Its gradient "
        "is clipped to the clip norm, so adding or removing one query moves the sum "
        "by at most the clip norm."
    ),
    "pair": (
        "Each example is one pair, a query with one of its documents, and an example's "
        "loss depends on that example alone. Its gradient is clipped to the clip norm, "
        "so adding or removing one pair moves the sum by at most the clip norm, and "
        "adding or removing a query of k pairs by at most k clip norms."
    ),
    "user": (
        "Each query belongs to one user, and an example's loss depends on that "
        "example alone. The gradients of all examples that a step draws of one user "
        "are added up and clipped to the clip norm together, so adding or removing "
        "one user moves the sum by at most the clip norm."
    ),
}


@dataclasses.dataclass(frozen=True)
class LoraSettings(settings.Settings):
    """A low-rank update of Dense layers; see `layers.apply_lora`."""

    rank: int = setting(0, ge=0, le=10**6, help="0 trains all weights")
    alpha: float = setting(16.0, gt=0, le=1e6, when="rank")
    targets: tuple[str, ...] = setting(
        ("*/query_projector", "*/value_projector"), of=Rule(), when="rank"
    )


@dataclasses.dataclass(frozen=True)
class SoftPromptSettings(settings.Settings):
    """Vectors before every document, which alone are trained; `layers.SoftPrompt`."""

    length: int = setting(
        0, ge=0, le=10**6, help="its authors used 20 to 100, a rate of 0.3, Adafactor"
    )


class Finetune(training.Training):
    """Trains a T5 to write queries."""

    name, kind = "finetune", Generator

    @dataclasses.dataclass(frozen=True)
    class Settings(
        training.OptimizerSettings,
        training.StepsSettings,
        training.StartSettings,
        training.PrivacySettings,
    ):
        """Settings of `finetune`: the paper's values for a full-size T5."""

        pairs: str = path(Pairs, "pydocs")
        split: str = setting("train")
        init: str = path(Generator, "", help='"" starts from random weights, by t5')
        histogram: str = path(
            Histogram, "", help="of these pairs, whose cost counts within epsilon"
        )
        vocabulary: str = path(File, "", when={"init": ("",)})
        t5: Any = nested(training.T5Settings, when={"init": ("",)})
        lora: Any = nested(LoraSettings)
        soft_prompt: Any = nested(SoftPromptSettings)
        trained: tuple[str, ...] = setting(
            ("*",), of=Rule(), help='patterns of paths, such as "*layer_norm*"'
        )
        dtype: str = setting("float32", choices=training.DTYPES)
        rematerialize: bool = setting(False, help="less memory, slower")
        prompt: str = setting(PROMPT, help='before every document; "" is none')
        document_length: int = setting(384, ge=2, le=10**6, help="tokens, end included")
        query_length: int = setting(128, ge=2, le=10**6)
        batch_size: int = setting(1024, ge=1)
        microbatch_size: int = setting(16, ge=1, speed=True)
        noiseless_learning_rate: float = setting(
            0.0, ge=0, le=1e3, help="where epsilon is inf; 0 is learning_rate"
        )
        jit_compile: bool = setting(False)
        seed: int = setting(0, ge=0, le=settings.SEED)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses what could not be certified, or would not train."""
        training.require_steps(s)
        training.require_continuable(s, given)
        if given["init"] is None and given["vocabulary"] is None:
            raise InputError(
                "init is '', and no vocabulary was given. Set vocabulary to the "
                f"{VOCABULARY_FILE} that prepare wrote, or init to a T5 with its own."
            )
        rank, length = s.lora.rank, s.soft_prompt.length
        if rank and length:
            raise InputError(
                f"lora.rank is {rank} and soft_prompt.length {length}: each freezes "
                "all weights but its own. Set one of them to 0."
            )
        if (rank or length) and s.trained != ("*",):
            name = "lora.rank" if rank else "soft_prompt.length"
            raise InputError(
                f"{name} is {rank or length} and trained {list(s.trained)}: all "
                f"weights but its own are frozen. Leave trained at ('*',), or set "
                f"{name} to 0."
            )

    def facts(self, s: Settings, given: Given) -> dict[str, Any]:
        """What an audit asks."""
        init = given["init"]
        return {
            "epsilon": settings.to_json(s.epsilon),
            "unit": s.unit,
            "split": s.split if given["pairs"].raw else "",
            "init": init.path if init else "",
        }

    def rate_setting(self, s: Settings) -> str:
        """A run without noise can have a rate of its own."""
        own = "noiseless_learning_rate"
        return own if getattr(s, own) and math.isinf(s.epsilon) else "learning_rate"

    def run(self, c: Context) -> dict[str, Any]:
        """Plans, pays, trains, and writes the generator."""
        assert c.devices is not None
        c.devices.require_share(c.settings.batch_size)
        units = training.units_of(c.given["pairs"], c.settings)
        c.counts["units"] = units.count
        n, _ = training.public_n(c.settings, units)
        rate = getattr(c.settings, self.rate_setting(c.settings))
        s = training.with_steps(c.settings, n)
        s = dataclasses.replace(s, learning_rate=rate)
        if c.given["histogram"] is not None:
            # What could not be synthesized by would be paid for in vain.
            documents.Histogram.load(c.given["histogram"].path).positive_counts()
        spec = training.spec_of(s, units)
        rows = plans.max_batch_size_of(spec) * spec.rows_per_unit
        batches.require_microbatches(rows, s.microbatch_size, c.devices.replicas)
        plan = training.make_plan(c, spec)
        preprocessor = _preprocessor(c)
        with training.paying(c, plan):
            with c.scope():
                model = load_generator(c, preprocessor)
                optimizer = training.make_optimizer(s)
            stored = training.stored_rows(c, units.rows.read(), preprocessor.arrays)
            outcome = training.train(
                c,
                s,
                model,
                plan,
                lambda batch: model.per_example_losses(batch, training=True),
                optimizer,
                stored.take,
                units,
                microbatch_size=s.microbatch_size,
                tokens=s.query_length + s.document_length,
                layers=[model],
                engine=s.engine,
                jit_compile=s.jit_compile,
            )
        certificate = self.certificate(c.settings, c.given)
        if units.private:
            facts = {
                **training.training_facts(s, model),
                "lora": settings.to_json(s.lora) if s.lora.rank else "none",
                "soft_prompt": s.soft_prompt.length or "none",
                **outcome.recorded(),
            }
            certificate = training.certificate_of(
                c,
                plan,
                outcome.paid,
                description="A T5 generator fine-tuned to write queries from "
                "documents.",
                sensitivity_argument=SENSITIVITY_ARGUMENTS[plan.spec.unit],
                training=facts,
            )
        model.preprocessor = preprocessor
        model.save_to_huggingface(c.out)
        records.write_certificate(c.out, certificate)
        return {"steps_executed": outcome.paid, **outcome.recorded()}


def _preprocessor(c: Context) -> Preprocessor:
    """Returns prompt, vocabulary and lengths.

    Raises:
      InputError: `init` has no vocabulary, or the prompt leaves no token to documents.
    """
    s, init, vocabulary = c.settings, c.given["init"], c.given.get("vocabulary")
    file = vocabulary.path if vocabulary else checkpoints.vocabulary_in(init.path)
    if file is None:
        raise InputError(
            f"init is {s.init}, which has no {VOCABULARY_FILE}. Put its vocabulary "
            "there, or convert it with one."
        )
    tokenizer = Tokenizer(file)
    _, (tokens,) = tokenizer.encode([s.prompt], s.document_length)
    if tokens >= s.document_length:
        raise InputError(
            f"document_length is {s.document_length} tokens, which the prompt "
            f"{shown(s.prompt)} and the end of the text fill: nothing of any document "
            "would be read. Raise document_length, or shorten prompt."
        )
    return Preprocessor(tokenizer, s.prompt, s.document_length, s.query_length)


def load_generator(c: Context, preprocessor: Preprocessor) -> T5QueryGenerator:
    """Returns the generator to start from, with its trained weights chosen.

    A new soft prompt starts as words drawn by the seed.

    Raises:
      InputError: vocabulary or choice of trained weights do not fit it.
    """
    s, init, length = c.settings, c.given["init"], c.settings.soft_prompt.length
    tf.keras.utils.set_random_seed(s.seed)
    options, tuned = (s.dtype, s.rematerialize, length), 0
    if init is not None:
        model = T5QueryGenerator.from_preset(init.path, *options)
        tuned = checkpoints.open_checkpoint(init.path).soft_prompt
    else:
        model = T5QueryGenerator(T5Config(**vars(s.t5)), *options)
    tokenizer = preprocessor.tokenizer
    tokenizer.require_embeddings(model.config.vocabulary_size, init is not None)
    if s.lora.rank:
        apply_lora(model, s.lora.rank, s.lora.alpha, list(s.lora.targets))
    else:
        train_only(model, ["*soft_prompt/*"] if length else list(s.trained))
    prompt = model.backbone.soft_prompt
    if prompt is not None and not tuned:
        words = _first_words(tokenizer, length, s.seed)
        embeddings = model.backbone.token_embedding.embeddings
        prompt.vectors.assign(tf.gather(embeddings, words))
    return model


def _first_words(tokenizer: Tokenizer, length: int, seed: int) -> list[int]:
    """Draws the initial words of a soft prompt, all different if there are enough.

    They are among the 5,000 most common, as in Lester et al. 2021 (section 3.2, figure
    3b).
    """
    common = tokenizer.common_ids(5000)
    random = np.random.default_rng(seed)
    return random.choice(common, length, replace=length > len(common)).tolist()


STAGE = Finetune()
