"""Differentially private training for any Keras model: spec, plan, step, proof."""

from tfdpsq.privacy.accounting import (
    calibrate_noise_multiplier,
    choose_max_batch_size,
    epsilon_of,
    truncation_delta,
)
from tfdpsq.privacy.certificate import make_certificate, read_certificate
from tfdpsq.privacy.optimizers import make_optimizer
from tfdpsq.privacy.plan import PrivacyPlan, make_plan
from tfdpsq.privacy.sampling import PoissonSampler
from tfdpsq.privacy.spec import PrivacySpec
from tfdpsq.privacy.step import make_logical_step
from tfdpsq.privacy.training import train

__all__ = [
    "PoissonSampler",
    "PrivacyPlan",
    "PrivacySpec",
    "calibrate_noise_multiplier",
    "choose_max_batch_size",
    "epsilon_of",
    "make_certificate",
    "make_logical_step",
    "make_optimizer",
    "make_plan",
    "read_certificate",
    "train",
    "truncation_delta",
]
