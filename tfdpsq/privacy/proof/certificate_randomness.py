"""A certificate's words on random numbers: what they protect from, and what not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdpsq.privacy.plan import PrivacyPlan
from tfdpsq.privacy.randomness import grid, secure

_DEFAULT = (
    "Attacks on floating-point arithmetic and on pseudorandom generators: noise is "
    "drawn and added in floating point, as the sum of two draws of Philox, and samples "
    "by numpy's PCG64; neither is a cryptographic generator. Noise and samples follow "
    "from 128 bits each of the operating system's entropy, compiled by XLA or not. "
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
# What certificates said whose noise was one draw, from a seed that XLA shortened.
_SHORTENED = (
    "Attacks on floating-point arithmetic and on pseudorandom generators: noise is "
    "drawn and added in floating point, by TensorFlow's Philox, and samples by numpy's "
    "PCG64; neither is a cryptographic generator. Of the operating system's entropy "
    "the noise has 126 bits where TensorFlow's own kernels ran, and 64 where XLA "
    "compiled the step (jit_compile, and every TPU, which draws with a generator of "
    "its own); samples have 128. The setting secure protects from these attacks."
)
_SHORTENED_ENTRIES = {
    "randomness.generator": "numpy's PCG64 for samples, TensorFlow's stateless "
    "generator for noise; neither is cryptographic",
    "randomness.key_bits.noise": 126,
    "randomness.key_bits.noise_compiled_by_xla": 64,
}
# What certificates said that had no entry "randomness".
_BEFORE = (
    "Attacks on floating-point arithmetic and on pseudorandom generators: noise "
    "is drawn in float32 from Philox, seeded with 126 bits of the operating "
    "system's entropy."
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


def as_stated(computed: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """The computed entries in the words of the version that made a certificate.

    Args:
      computed: {dotted path: entry} of a plan that is not secure.
      stated: those of the certificate.
    """
    kept = dict(computed)
    if not any(path.startswith("randomness") for path in stated):
        words = _BEFORE
        kept = {p: e for p, e in kept.items() if not p.startswith("randomness.")}
    elif "randomness.key_bits.noise_compiled_by_xla" in stated:
        words = _SHORTENED
        kept.update(_SHORTENED_ENTRIES)
    else:
        return kept
    lines = [words if line == _DEFAULT else line for line in kept["not_covered"]]
    return {**kept, "not_covered": lines}
