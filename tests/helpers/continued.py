"""Certificates of runs that continue others, and their ε in closed form."""

import dataclasses
import math

import scipy.optimize
import scipy.stats

from tfdpsq.privacy import (
    Continuation,
    PrivacySpec,
    make_certificate,
    make_continuation_certificate,
    make_plan,
)
from tfdpsq.privacy.proof import budget

# Every batch is the whole log, so that ε has a closed form.
WHOLE = PrivacySpec(
    epsilon=2.0,
    clip_norm=0.5,
    num_units=500,
    batch_size=500,
    max_batch_size=600,
    steps=4,
    delta=1e-5,
)
SPECS = tuple(
    dataclasses.replace(WHOLE, epsilon=epsilon, steps=steps)
    for epsilon, steps in ((2.0, 4), (1.0, 7), (1.5, 3))
)
WHOLE_LARGER = dataclasses.replace(WHOLE, epsilon=3.0)
WORDS = {
    "description": "A model.",
    "sensitivity_argument": "Each loss depends on one unit alone.",
    "training": {"learning_rate": 0.1},
}


def first(spec=SPECS[0], head="h1", pairs="p1", steps=None):
    return make_certificate(
        make_plan(spec),
        spec.steps if steps is None else steps,
        fingerprints={"pairs": pairs} if pairs else {},
        ledger_head=head,
        **WORDS,
    )


def continuation(parent, spec, disjoint, head, pairs, steps=None):
    return Continuation(
        make_plan(spec),
        spec.steps if steps is None else steps,
        pairs,
        parent,
        budget.release_of(parent),
        disjoint,
        head,
    )


def following(parent, spec=SPECS[1], disjoint=None, head="h2", pairs="p2", steps=None):
    return make_continuation_certificate(
        continuation(parent, spec, disjoint, head, pairs, steps),
        fingerprints={"pairs": pairs} if pairs else {},
        **WORDS,
    )


def gaussian(specs, delta=1e-5, steps=None):
    """ε of Gaussian mechanisms on whole logs (Balle and Wang 2018, theorem 8)."""
    counts = steps or [spec.steps for spec in specs]
    sigmas = [make_plan(spec).noise_multiplier for spec in specs]
    mu = math.sqrt(sum(n / sigma**2 for n, sigma in zip(counts, sigmas)))
    cdf = scipy.stats.norm.cdf

    def excess(epsilon):
        return (
            cdf(mu / 2 - epsilon / mu)
            - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)
            - delta
        )

    return scipy.optimize.brentq(excess, 0.0, 100.0)


def stated(certificate):
    return certificate["guarantee"]["epsilon"]


def releases(**certificates):
    return {name: budget.release_of(made) for name, made in certificates.items()}


def kinds():
    """Certificates of a composed and of a disjoint continuation."""
    parent = first()
    return {
        "composed": following(parent),
        "time": following(parent, disjoint="time"),
    }
