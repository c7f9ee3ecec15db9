"""What can be known to be wrong with a whole job before its first stage."""

from __future__ import annotations

import ml_collections

from tfdpsq import retriever, validation
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
    for field in ("epsilons", "direct_epsilons", "audit_epsilons"):
        for epsilon in config[field]:
            if not (isinstance(epsilon, (int, float)) and epsilon > 0):
                raise validation.InputError(
                    f"{field} holds {epsilon!r}; every epsilon must be above 0 "
                    '(float("inf") trains without privacy).'
                )
    for init in (config.init, config.retriever_init):
        sources.require_public(init, "rows that are called public would start from it")
    validation.one_of("direct.method", config.direct.method, retriever.METHODS)
    synthesis = config.synthesize
    validation.in_range("synthesize.top_p", synthesis.top_p, 0, 1, low_open=True)
    for stage in ("pretrain", "finetune", "synthesize", "retriever", "direct"):
        for field in ("document_length", "query_length", "batch_size"):
            if field in config[stage]:
                validation.positive_integer(f"{stage}.{field}", config[stage][field])


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
