"""What audits found, in sentences that need no table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tfdpsq.run.report.wording import epsilon_text, least_text

ATTACKS = {
    "generator": "the generator's likelihoods",
    "set_language_model": "a language model of the set",
    "set_nearest": "the most similar query of the set",
    "loss": "the generator's loss",
    "likelihood_ratio": "likelihood against public weights",
}
# A mean rank this unlikely by chance is called a leak.
_LEVEL = 0.05


def verdicts(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what `audit.json` of a generator says of leaks."""
    entries = [entry for entry in found["canaries"] if entry["form"] == "all"]
    for entry in entries:
        times = entry["repetitions"]
        times = "put in once" if times == 1 else f"repeated {times} times"
        learnt = entry["p_value"] < _LEVEL
        said = "were learnt" if learnt else "look like secrets that nobody trained on"
        yield (
            f"{name}: secrets {times} {said}: mean rank {entry['mean_rank']:.1f} of "
            f"{entry['candidates']}, by chance {entry['chance']:g} (p = "
            f"{entry['p_value']:.2g}); {entry['leaked']:.0%} of them were written out."
        )
    certified = float(found["epsilon_certified"])
    most = max((entry["units"] for entry in entries), default=1)
    if most > 1 and math.isfinite(certified):
        yield (
            f"{name}: ε = {epsilon_text(certified)} is for one {found['unit']}; a "
            f"secret in {most} of them has {most} times as much. If people repeat "
            "themselves, set finetune.unit to 'user'."
        )
    if not found["one_run"]:
        return
    strongest = max(each["epsilon"] for each in found["one_run"].values())
    if math.isinf(certified):
        verdict = "with nothing certified"
    elif strongest <= certified:
        verdict = f"below the certified {epsilon_text(certified)}, as it must be"
    elif "zero-out" in str(found.get("adjacency")):
        verdict = (
            f"above the certified {epsilon_text(certified)}, which it does not refute: "
            "that is for queries replaced by nothing, not left out as here"
        )
    else:
        verdict = "which refutes the certificate: do not release anything"
    yield (
        f"{name}: the strongest attack shows that ε is at least "
        f"{least_text(strongest, 2)} ({found['confidence']:.0%} confidence), {verdict}."
    )
