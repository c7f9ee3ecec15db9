"""The generator that fine-tuning starts from, and the choice of trained weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import Tokenizer
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.layers import T5Config, apply_lora, train_only
from tfdpsq.run.core import acting, sources
from tfdpsq.run.training import training_settings

# The shape of a T5 that starts from random weights; the setting `t5` of `finetune`.
T5 = training_settings.t5_settings(32128, 8, 6, 512, 1024, 64)


def load_generator(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer
) -> T5QueryGenerator:
    """Loads the generator in `config.init`, or makes a random one by `config.t5`.

    Raises:
      InputError: the vocabulary, the choice of trained weights, or a shape in
        `config.t5` does not fit.
    """
    tf.keras.utils.set_random_seed(config.seed)
    options = (config.dtype, config.rematerialize, config.soft_prompt.length)
    tuned = 0
    if config.init:
        model = T5QueryGenerator.from_preset(config.init, *options)
        tuned = checkpoints.open_checkpoint(config.init).soft_prompt
    else:
        model = T5QueryGenerator(T5Config(**config.t5), *options)
    acting.require_shape(config, T5, model.config)
    tokenizer.require_embeddings(model.config.vocabulary_size, bool(config.init))
    given = config.vocabulary or "the file next to init"
    sources.require_own_vocabulary("vocabulary", given, tokenizer, config.init)
    choose_trained(model, config.lora, config.soft_prompt.length, tuple(config.trained))
    if (prompt := model.backbone.soft_prompt) is not None and not tuned:
        words = _first_words(tokenizer, config.soft_prompt.length, config.seed)
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


def choose_trained(
    model: T5QueryGenerator,
    lora: Mapping[str, Any],
    length: int,
    trained: Sequence[str],
) -> None:
    """Freezes all but a low-rank update, a soft prompt, or a part of the weights.

    `lora` has `rank`, `alpha` and `targets`; `length` is that of the soft prompt.

    Raises:
      InputError: the settings do not fit the model, or two of them are given.
    """
    rank, trained = lora["rank"], list(trained)
    if rank and length:
        raise validation.InputError(
            f"lora.rank is {rank} and soft_prompt.length {length}: each freezes all "
            "weights but its own. Set one of them to 0."
        )
    if (rank or length) and trained != ["*"]:
        name, what = ("lora.rank", "LoRA") if rank else ("soft_prompt.length", "it")
        raise validation.InputError(
            f"{name} is {rank or length} and trained {trained}: {what} "
            f"freezes all weights but its own. Leave trained at ('*',), or set {name} "
            "to 0."
        )
    if rank:
        apply_lora(model, rank, lora["alpha"], list(lora["targets"]))
    elif length:
        train_only(model, ["*soft_prompt/*"])
    else:
        train_only(model, trained)
