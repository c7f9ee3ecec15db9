"""Rate, steps and privacy spec of an adapter, for its stage and for a whole job."""

from __future__ import annotations

import math

import ml_collections

from tfdpsq import privacy
from tfdpsq.run.training import private_training

# (learning rate, steps) where gradients are clipped, and without epsilon.
_CLIPPED, _UNCLIPPED = (2.0, 40), (0.3, 80)


def resolved(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns the settings with the rate and the steps that 0 stands for."""
    config = config.copy_and_resolve_references()
    clipped = math.isfinite(float(config.epsilon))
    for name, value in zip(
        ("learning_rate", "steps"), _CLIPPED if clipped else _UNCLIPPED
    ):
        config[name] = config[name] or value
    return config


def spec_of(
    config: ml_collections.ConfigDict, units: private_training.Units
) -> privacy.PrivacySpec:
    """Returns the spec of resolved settings; the batch is a share of the units.

    Raises:
      InputError: n was not declared, or what `PrivacySpec` raises.
    """
    whole = config.copy_and_resolve_references()
    n = private_training.public_n(config, units.count, units.private)
    with whole.unlocked():
        whole.batch_size = max(1, round(config.sampling_probability * n))
        whole.epochs = 0.0
    return private_training.spec_of(whole, units)
