"""What can be known to be wrong with a whole job before its first stage."""

from __future__ import annotations

import ml_collections

from tfdpsq import validation
from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.run.core import sources


def check_settings(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that some stage would refuse later.

    Raises:
      InputError: names the setting.
    """
    if config.strict:
        raise validation.InputError(
            "strict is True, but this job measures every row of its table on private "
            "queries, which no epsilon covers. Run the stages finetune and synthesize "
            "by themselves with --config.strict=True, or leave strict False."
        )
    for init in (config.init, config.retriever_init):
        sources.require_public(init, "rows that are called public would start from it")


def check_sizes(config: ml_collections.ConfigDict, n: int) -> None:
    """Refuses batches and δ that do not fit the number of training pairs.

    Raises:
      InputError: names the setting.
    """
    for stage in ("finetune", "retriever", "direct"):
        if config[stage].batch_size > n:
            raise validation.InputError(
                f"{stage}.batch_size {config[stage].batch_size} is larger than the "
                f"data: split 'train' of {config.data} has {n} pairs. Lower it."
            )
        delta = config[stage].delta
        if delta and delta >= 1 / n:
            raise validation.InputError(
                f"{stage}.delta is {delta}, but n is {n}: it must be below 1/n = "
                f"{1 / n:.3g}; 1/(2n) = {0.5 / n:.3g} is the default."
            )


def require_one_vocabulary(init: str, ours: str) -> None:
    """Refuses retrievers that start from a T5 with another vocabulary.

    Args:
      init: the T5 that retrievers start from, or "".
      ours: the SentencePiece file of everything else.

    Raises:
      InputError: the two differ.
    """
    theirs = checkpoints.vocabulary_in(checkpoints.locate(init)) if init else None
    if theirs is None:
        return
    if Tokenizer(theirs).fingerprint != Tokenizer(ours).fingerprint:
        raise validation.InputError(
            f"retriever_init is {init}, whose vocabulary {theirs} is not the one that "
            f"everything else has, {ours}. Give T5s of one vocabulary."
        )
