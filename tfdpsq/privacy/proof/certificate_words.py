"""Words that certificates share, and how earlier versions put some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
# What certificates said before, which is too little: of ten queries in every batch,
# each with epsilon 8, it is 231 at the same delta. None of them was for pairs.
_BEFORE = {
    "query": "A person who wrote several queries: each query is protected by "
    "itself, and k of them together by about k times epsilon.",
    "user": "A group of users, such as a household: each user is protected by "
    "itself, and k of them together by about k times epsilon.",
}

# Begins the words on earlier releases, which could only be weights before.
CAME_AFTER = "This run came after the release whose certificate is given as parent."
_STARTED_FROM = (
    "Training started from released weights, whose certificate is given as parent."
)
_IN_WORDS = "continuation.in_words"


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


def warnings_of(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Lists sentences of earlier versions that say too little, each with today's.

    Args:
      certificate: of any version of this format.
    """
    said = certificate.get("not_covered")
    return tuple(
        f"not_covered says {before!r}, which is too little. True is: {_SEVERAL[unit]}"
        for unit, before in _BEFORE.items()
        if isinstance(said, list) and before in said
    )


def as_stated(computed: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """The computed entries in the words of the version that made a certificate.

    Args:
      computed: {dotted path: entry}, those on random numbers in its words already.
      stated: those of the certificate.
    """
    if str(stated.get(_IN_WORDS)).startswith(_STARTED_FROM) and _IN_WORDS in computed:
        before = str(computed[_IN_WORDS]).replace(CAME_AFTER, _STARTED_FROM)
        computed = {**computed, _IN_WORDS: before}
    said = stated.get("not_covered")
    # Versions that drew noise with 128 bits had today's sentences already. (A secure
    # plan's keys always had 256, so of those only `warnings_of` speaks.)
    if computed.get("randomness.key_bits.noise") == 128:
        return dict(computed)
    older = {_SEVERAL[unit]: before for unit, before in _BEFORE.items()}
    lines = [
        older[line]
        if line in older and isinstance(said, list) and older[line] in said
        else line
        for line in computed["not_covered"]
    ]
    return {**computed, "not_covered": lines}
