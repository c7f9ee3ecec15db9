"""Differentially private training for any Keras model: spec, plan, step, proof."""

from typing import TYPE_CHECKING

import tfdpsq.privacy.environment  # noqa: F401  says what is missing
from tfdpsq import lazy

if TYPE_CHECKING:
    from tfdpsq.privacy.accounting import (
        calibrate_noise_multiplier,
        choose_max_batch_size,
        epsilon_of,
        truncation_delta,
    )
    from tfdpsq.privacy.checkpoint import discard as discard_state
    from tfdpsq.privacy.keys import RunKey
    from tfdpsq.privacy.loop import Diverged, Preempted
    from tfdpsq.privacy.model import PrivateModel
    from tfdpsq.privacy.plan import PrivacyPlan, make_plan
    from tfdpsq.privacy.proof.certificate import (
        code_fingerprint,
        make_certificate,
        read_certificate,
    )
    from tfdpsq.privacy.proof.ledger import Ledger, read_ledger
    from tfdpsq.privacy.proof.reads import PrivateReads
    from tfdpsq.privacy.proof.verification import Verification, verify_certificate
    from tfdpsq.privacy.randomness.sampling import Groups, PoissonSampler
    from tfdpsq.privacy.spec import ENGINES, PrivacySpec
    from tfdpsq.privacy.step import make_logical_step
    from tfdpsq.privacy.training import train
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
    "Verification",
    "calibrate_noise_multiplier",
    "choose_max_batch_size",
    "code_fingerprint",
    "discard_state",
    "epsilon_of",
    "make_certificate",
    "make_logical_step",
    "make_plan",
    "read_certificate",
    "read_ledger",
    "train",
    "truncation_delta",
    "verify_certificate",
]
