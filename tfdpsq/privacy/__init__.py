"""Differentially private training for any Keras model: spec, plan, step, proof."""

import sys
from typing import TYPE_CHECKING

from tfdpsq import lazy

if "tfdpsq.stack" not in sys.modules:  # which has looked for Keras 2
    from tfdpsq.keras_choice import keras2  # noqa: F401  or says what is missing

if TYPE_CHECKING:
    from tfdpsq.privacy.accounting import calibrate_noise_multiplier, composed_epsilon
    from tfdpsq.privacy.checkpoint import discard as discard_state
    from tfdpsq.privacy.keys import RunKey
    from tfdpsq.privacy.model import PrivateModel
    from tfdpsq.privacy.plan import PrivacyPlan, make_plan
    from tfdpsq.privacy.proof.certificate import (
        code_fingerprint,
        make_certificate,
        read_certificate,
        verify_certificate,
    )
    from tfdpsq.privacy.proof.ledger import Ledger, PrivateReads, read_ledger
    from tfdpsq.privacy.randomness.sampling import Groups, PoissonSampler
    from tfdpsq.privacy.spec import ENGINES, PrivacySpec
    from tfdpsq.privacy.step import make_logical_step
    from tfdpsq.privacy.training import Diverged, Preempted, train
    from tfdpsq.validation import DataError, InputError
else:
    __getattr__, __dir__ = lazy.package(__name__)

__all__ = [
    "DataError",
    "Diverged",
    "ENGINES",
    "Groups",
    "InputError",
    "Ledger",
    "PoissonSampler",
    "Preempted",
    "PrivacyPlan",
    "PrivacySpec",
    "PrivateModel",
    "PrivateReads",
    "RunKey",
    "calibrate_noise_multiplier",
    "code_fingerprint",
    "composed_epsilon",
    "discard_state",
    "make_certificate",
    "make_logical_step",
    "make_plan",
    "read_certificate",
    "read_ledger",
    "train",
    "verify_certificate",
]
