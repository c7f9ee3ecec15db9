"""Certificates edited in several places at once, with the digest made anew.

Each forgery keeps as much consistent as a forger would think of; one entry at a time
is edited in test_verification.py.
"""

import copy
import dataclasses
import math

import pytest
from helpers import plans

from tfdpsq.privacy import PrivacySpec, make_plan, verify_certificate
from tfdpsq.privacy.proof.certificate import digest_of

_SPEC = PrivacySpec(
    epsilon=0.5,
    clip_norm=0.5,
    num_units=2000,
    batch_size=100,
    steps=12,
    delta=4e-4,
    max_batch_size=160,
    sensitivity_multiplier=2.0,
)


def _forged(certificate, *edits):
    """A copy with each (path, value) put in, and the digest that belongs to it."""
    copied = copy.deepcopy(certificate)
    for path, value in edits:
        *above, last = path.split(".")
        holder = copied[above[0]] if above else copied
        holder[last] = value(holder[last]) if callable(value) else value
    return {**copied, "digest": digest_of(copied)}


def _times(factor):
    return lambda value: value * factor


@pytest.mark.parametrize(
    "edits, found",
    [
        # A lower ε in all places where it stands.
        (
            [("guarantee.epsilon", 0.2), ("accounting.epsilon_pld", 0.2)],
            "guarantee.epsilon is 0.2",
        ),
        (
            [
                ("guarantee.epsilon", 0.2),
                ("accounting.epsilon_pld", 0.2),
                ("accounting.target_epsilon", 0.2),
                ("spec.epsilon", 0.2),
            ],
            "with which all 12 planned steps spend epsilon",
        ),
        # A thousandth of a percent less.
        (
            [
                ("guarantee.epsilon", _times(1 - 1e-5)),
                ("accounting.epsilon_pld", _times(1 - 1e-5)),
            ],
            "accounting.epsilon_pld is",
        ),
        # More noise than there was.
        (
            [
                ("mechanism.noise_multiplier", _times(2)),
                ("mechanism.noise_stddev", _times(2)),
            ],
            "guarantee.epsilon is",
        ),
        # Noise for a smaller clip norm or sensitivity than what was clipped to.
        (
            [("mechanism.noise_multiplier", _times(2)), ("spec.clip_norm", _times(2))],
            "mechanism.clip_norm is 0.5",
        ),
        (
            [
                ("spec.sensitivity_multiplier", 1.0),
                ("mechanism.sensitivity", _times(0.5)),
                ("mechanism.noise_multiplier", _times(2)),
            ],
            "guarantee.epsilon is",
        ),
        (
            [
                ("spec.clip_norm", _times(2)),
                ("mechanism.clip_norm", _times(2)),
                ("mechanism.sensitivity", _times(2)),
                ("mechanism.noise_stddev", _times(2)),
            ],
            "plan is",
        ),
        # More units, and so a smaller q.
        (
            [("spec.n", 4000), ("sampler.n", 4000), ("spec.delta", 2e-4)],
            "sampler.sampling_probability is 0.05",
        ),
        (
            [
                ("spec.n", 4000),
                ("sampler.n", 4000),
                ("sampler.sampling_probability", 0.025),
                ("spec.delta", 2e-4),
                ("guarantee.delta", 2e-4),
            ],
            "guarantee.epsilon is",
        ),
        # Smaller batches.
        (
            [
                ("spec.batch_size", 50),
                ("sampler.expected_batch_size", 50),
                ("sampler.sampling_probability", 0.025),
            ],
            "guarantee.epsilon is",
        ),
        # Fewer steps.
        (
            [("accounting.steps_executed", 5), ("accounting.releases_counted", 5)],
            "guarantee.epsilon is",
        ),
        # Another δ, with or without its warning.
        (
            [("guarantee.delta", 1e-6), ("spec.delta", 1e-6)],
            "guarantee.epsilon is",
        ),
        ([("warnings", [])], "warnings is []"),
        # A batch that was truncated less than it was.
        (
            [("spec.max_batch_size", 200), ("sampler.max_batch_size", 200)],
            "accounting.delta_for_truncation is",
        ),
        # RDP's figure passed off as PLD's, or PLD's under RDP's name.
        (
            [("spec.accountant", "rdp"), ("accounting.accountant", "rdp")],
            "guarantee.epsilon is",
        ),
        # A number that was not declared to be exact.
        (
            [
                ("spec.n_is_public", True),
                (
                    "sampler.n_in_words",
                    "the exact number of units, declared to be public",
                ),
            ],
            "plan is",
        ),
        # A weaker unit under a stronger one's name.
        (
            [("spec.unit", "user"), ("guarantee.unit", "user")],
            "guarantee.unit_in_words is",
        ),
        # A certificate for queries where pairs were protected: the latter is weaker,
        # and its words are kept.
        (
            [
                ("spec.unit", "pair"),
                ("guarantee.unit", "pair"),
                (
                    "guarantee.unit_in_words",
                    "one pair: one query with one of its documents. A query that is "
                    "paired with several documents is as many units",
                ),
            ],
            "not_covered is",
        ),
        # Nothing that is not covered.
        ([("not_covered", [])], "not_covered is []"),
    ],
)
def test_forgeries_with_a_new_digest_are_found(edits, found):
    forged = _forged(plans.certificate(make_plan(_SPEC)), *edits)
    problems = verify_certificate(forged).problems
    assert any(found in problem for problem in problems), problems
    assert not any("digest" in problem for problem in problems)


def test_a_true_value_beside_a_false_one_does_not_cover_it():
    """Under a key with a dot, which looks like the path of the false one."""
    certificate = plans.certificate(make_plan(_SPEC))
    true = certificate["guarantee"]["epsilon"]
    lowered = {**certificate["guarantee"], "epsilon": 0.2}
    decoy = {**certificate, "guarantee": lowered, "guarantee.epsilon": true}
    problems = verify_certificate(_forged(decoy)).problems
    assert any("guarantee.epsilon is 0.2" in problem for problem in problems)


def test_poisson_figures_for_shuffled_batches_are_found():
    shuffled = make_plan(
        dataclasses.replace(
            _SPEC, sampler="shuffled", n_is_public=True, max_batch_size=None
        )
    )
    certificate = plans.certificate(shuffled)
    poisson = plans.certificate(
        dataclasses.replace(
            make_plan(_SPEC), noise_multiplier=shuffled.noise_multiplier
        )
    )
    lower = poisson["guarantee"]["epsilon"]
    assert lower < 0.6 * certificate["guarantee"]["epsilon"]
    forged = _forged(
        certificate,
        ("guarantee.epsilon", lower),
        ("accounting.epsilon_pld", lower),
        ("accounting.epsilon_rdp", poisson["accounting"]["epsilon_rdp"]),
    )
    problems = verify_certificate(forged).problems
    assert any("guarantee.epsilon is" in problem for problem in problems)


_SECURE = dataclasses.replace(_SPEC, secure=True)


@pytest.mark.parametrize(
    "made, edits, found",
    [
        # A run of the default passed off as secure: in words, in its spec, in both.
        (_SPEC, [("randomness.secure", True)], "randomness.secure is True"),
        (_SPEC, [("spec.secure", True)], "randomness.secure is False"),
        (
            _SPEC,
            [("spec.secure", True), ("randomness", "of the secure one")],
            "mechanism.sensitivity is 1.0",
        ),
        (
            _SPEC,
            [
                ("spec.secure", True),
                ("randomness", "of the secure one"),
                ("not_covered", "of the secure one"),
                ("mechanism", "of the secure one"),
            ],
            "plan is",
        ),
        # A finer or no grid, and noise that does not pay for rounding.
        (_SECURE, [("randomness.grid_step", _times(0.5))], "randomness.grid_step is"),
        (_SECURE, [("randomness.grid_step", None)], "randomness.grid_step is None"),
        (
            _SECURE,
            [
                ("mechanism.sensitivity", 1.0),
                ("mechanism.noise_stddev", _times(1 / (1 + 2**-16))),
            ],
            "mechanism.sensitivity is 1.0",
        ),
        # A shorter key; more protection than there is; less said than is known.
        (
            _SECURE,
            [("randomness.key_bits", {"samples": 512, "noise": 512})],
            "randomness.key_bits.noise is 512",
        ),
        (
            _SECURE,
            [("randomness", {"secure": True})],
            "randomness.generator is missing",
        ),
        (
            _SPEC,
            [("randomness.key_bits", {"samples": 128, "noise": 256})],
            "randomness.key_bits.noise is 256",
        ),
        # The words of the version before, in a certificate of today's.
        (_SPEC, [("randomness", None)], "randomness"),
        (_SECURE, [("spec", "without secure")], "plan is"),
    ],
)
def test_forged_claims_of_security_are_found(made, edits, found):
    certificate = plans.certificate(make_plan(made))
    secure = plans.certificate(make_plan(_SECURE))

    def value_of(path, value):
        if value == "of the secure one":
            return secure[path]
        if value == "without secure":
            return {k: v for k, v in certificate[path].items() if k != "secure"}
        return value

    forged = _forged(certificate, *((path, value_of(path, v)) for path, v in edits))
    problems = verify_certificate(forged).problems
    assert any(found in problem for problem in problems), problems
    assert not any("digest" in problem for problem in problems)


def test_a_secure_run_was_never_certified_without_its_randomness():
    """Certificates from before they had the entry are of the default alone."""
    certificate = plans.certificate(make_plan(_SECURE))
    left = {key: value for key, value in certificate.items() if key != "randomness"}
    problems = verify_certificate(_forged(left)).problems
    assert any("randomness.secure is missing" in problem for problem in problems)


def test_an_unprotected_run_cannot_be_passed_off_as_private():
    forged = _forged(
        plans.certificate(make_plan(dataclasses.replace(_SPEC, epsilon=math.inf))),
        ("private", True),
        ("guarantee.epsilon", 1.0),
        ("spec.epsilon", 1.0),
        ("accounting.target_epsilon", 1.0),
    )
    result = verify_certificate(forged)
    assert any("noise_multiplier is 0.0" in problem for problem in result.problems)
    assert math.isnan(result.epsilon_pld)
