"""The words of certificates. They are rendered, and never compared."""

from __future__ import annotations

from typing import Any

from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness import grid, secure

# The unit, singular and plural.
NOUNS = {
    "query": ("query", "queries"),
    "pair": ("pair", "pairs"),
    "user": ("user", "users"),
}
_SEVERAL = {
    "query": "A person who wrote several queries: each query is protected by itself. "
    "k of them together have k times epsilon only at a delta of at most "
    "k * exp((k - 1) * epsilon) times as much; at the same delta they can have far "
    "more.",
    "pair": "A query with several documents, and a person who wrote several queries: "
    "each pair is protected by itself, not the query that it is of. k pairs together "
    "have k times epsilon only at a delta of at most k * exp((k - 1) * epsilon) times "
    "as much; at the same delta they can have far more.",
    "user": "A group of users, such as a household: each user is protected by itself. "
    "k of them together have k times epsilon only at a delta of at most "
    "k * exp((k - 1) * epsilon) times as much; at the same delta they can have far "
    "more.",
}

CAME_AFTER = "This run came after the release whose certificate is given as parent."


def several_units(unit: str) -> str:
    """States what (ε, δ) means for k units of one owner, by group privacy.

    M and M' of neighbours at distance k: by k steps of the definition,
    P(S) ≤ e^{kε}·Q(S) + (1 + e^ε + … + e^{(k−1)ε})·δ, and the sum is at most
    k·e^{(k−1)ε} (Vadhan 2017, *The Complexity of Differential Privacy*, lemma 2.2). The
    noise of a Gaussian mechanism is σ/k for k units, so that at the same δ it costs
    them more than k·ε.

    Args:
      unit: "query", "pair" or "user".
    """
    return _SEVERAL[unit]


_DEFAULT = (
    "Attacks on floating-point arithmetic and on pseudorandom generators: noise is "
    "drawn and added in floating point, from the bits of two draws of Philox, and "
    "samples by numpy's PCG64; neither is a cryptographic generator. Both follow from "
    "128 bits of the operating system's entropy, compiled by XLA or not. "
    "Each of the two draws has a Philox key of 63 bits and as many secret bits in its "
    "counter. The setting secure protects from these attacks."
)
_SECURE = (
    "Attacks on the cryptographic generator itself or on the operating system's "
    "entropy, and on times and memory of the machine. Rounding errors where clipped "
    "gradients are computed and summed up, in floating point, before the sum is put "
    "on its grid: the sensitivity is that of exact sums. Dropout masks, which "
    "TensorFlow draws from a secret seed, but not by a cryptographic generator."
)


def not_covered(plan: PrivacyPlan) -> str:
    """The attacks on random numbers that (ε, δ) does not speak of."""
    return _SECURE if plan.spec.secure else _DEFAULT


def randomness(plan: PrivacyPlan) -> dict[str, Any]:
    """The entry that says what random numbers were drawn with."""
    if not plan.spec.secure:
        return {
            "secure": False,
            "generator": "numpy's PCG64 for samples, Philox for noise; neither is "
            "cryptographic",
            "key_bits": {"samples": 128, "noise": 128},
            "grid_step": None,
            "in_words": "Noise is drawn and added in floating point. What this does "
            "not protect from stands under not_covered.",
        }
    words = (
        f"Samples, their dealing to groups and noise come from {secure.GENERATOR}, "
        f"under keys that HKDF-SHA256 derives for each from {secure.KEY_BITS} bits of "
        "the operating system's entropy."
    )
    if plan.grid_step is not None:
        words += (
            f" The clipped sum is rounded to multiples of {plan.grid_step!r}, and the "
            "noise is a Gaussian rounded to the same grid, drawn exactly up to a total "
            "variation of 2^-100 a weight; both are added as integers. So what is "
            "released is a function of a Gaussian mechanism in real numbers, and its "
            "low-order bits tell nothing more. The stated sensitivity includes the "
            f"rounding of up to 2^{grid.MOST_WEIGHTS.bit_length() - 1} weights, a "
            "share of 2^-16."
        )
    return {
        "secure": True,
        "generator": f"{secure.GENERATOR} of the package cryptography (OpenSSL)",
        "key_bits": {"samples": secure.KEY_BITS, "noise": secure.KEY_BITS},
        "grid_step": plan.grid_step,
        "in_words": words,
    }
