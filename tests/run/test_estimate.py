"""The estimator of a training step's memory: counts by hand."""

import dataclasses
import math

from tfdpsq.layers import T5Config
from tfdpsq.run import estimate, finetune
from tfdpsq.run.estimation import finetuning

_SHAPE = T5Config(64, 1, 2, 16, 24, 8, "1.0", dropout=0.1)


def _config(**changes):
    config = finetune.default_config()
    config.t5.update(dataclasses.asdict(_SHAPE))
    config.update({"epsilon": math.inf, "batch_size": 8, "microbatch_size": 4})
    config.update({"document_length": 12, "query_length": 6, **changes})
    return config


def test_parts_are_counted_as_by_hand():
    found = finetuning.estimate(_config(), process=10**9)
    # Embedding; per layer and stack 4 or 8 projections, two of the feed-forward, 2
    # or 3 norms; two bias tables [32, 2]; two last norms.
    attention, hidden = 4 * 16 * 16, 2 * 16 * 24
    count = 64 * 16 + 3 * attention + 2 * hidden + 5 * 16 + 2 * 64 + 2 * 16
    assert found.parameters == found.trained == count
    assert found.memory.weights == found.memory.sums == 4 * count
    # Two moments of each weight, and a count of steps.
    assert 0 <= found.memory.optimizer - 2 * 4 * count < 100
    assert f"{count:,} parameters" in estimate.as_text(_config(), found)
    # Query and value of three attentions: 16 x 2 and 2 x 16 numbers each.
    lora = finetuning.estimate(_config(lora={"rank": 2}), process=0)
    assert lora.trained == 6 * 2 * 2 * 16
