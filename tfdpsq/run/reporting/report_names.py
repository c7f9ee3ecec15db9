"""What stages and what they wrote are called in the report."""

from __future__ import annotations

import math
import re

# By the start of a name, the longest first: (called, what it is).
_KINDS = {
    "audited_synthetic": ("Set for the audit", "its generator writes queries"),
    "retriever_synthetic": (
        "Retriever, synthetic",
        "the search model is trained on what the generator wrote",
    ),
    "retriever_public_only": (
        "Retriever, public-only",
        "the search model is trained on sentences of public documents",
    ),
    "retriever_untrained": (
        "Retriever, untrained",
        "the search model as it is before training",
    ),
    "retriever_original": (
        "Retriever, original pairs",
        "the search model is trained on the private pairs, unprotected",
    ),
    "retriever_direct": (
        "Retriever, direct DP",
        "the search model is trained on the private pairs, under noise",
    ),
    "public_model": ("Public T5", "the language model reads the public documents"),
    "generator": ("Generator", "the language model learns to write queries"),
    "synthetic": ("Synthetic set", "the generator writes queries for documents"),
    "evaluation": ("Evaluation", "all retrievers search for the test queries"),
    "canaries": ("Canaries", "secrets are put among private pairs, for the audit"),
    "audited": (
        "Audited generator",
        "one more is trained, on pairs with planted secrets",
    ),
    "prepare": ("Public pairs", "sentences are cut from public documents"),
    "audit": ("Audit", "attacks on that generator, and on what it wrote"),
}
_EPSILON = re.compile(r"_(?:eps([0-9.e+-]+)|(inf))$")


def run_label(name: str) -> str:
    """What a stage's directory is called: "Generator, ε = 8" for "generator_eps8".

    Names that no stage of the pipeline has stay as they are.
    """
    kind = _kind(name)
    if kind is None:
        return name
    epsilon = _EPSILON.search(name)
    if epsilon is None:
        return _KINDS[kind][0]
    return f"{_KINDS[kind][0]}, ε = {epsilon_symbol(float(epsilon[1] or math.inf))}"


def run_note(name: str) -> str:
    """What is done in a stage, in words; "" for one that is not of the pipeline."""
    kind = _kind(name)
    return "" if kind is None else _KINDS[kind][1]


def set_label(name: str) -> str:
    """What a synthetic set is called, by its ε: "Synthetic, ε = 8" for "eps8"."""
    epsilon = _EPSILON.search(f"_{name}")
    if epsilon is None:
        return name
    return f"Synthetic, ε = {epsilon_symbol(float(epsilon[1] or math.inf))}"


def epsilon_symbol(epsilon: float) -> str:
    """ε as people read it: "∞", or the number without a needless point."""
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def _kind(name: str) -> str | None:
    plain = _EPSILON.sub("", name)
    return plain if plain in _KINDS else None
