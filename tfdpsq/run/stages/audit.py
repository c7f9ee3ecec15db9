r"""Measure what a generator, and the set that it wrote, leak about training queries.

    tfdpsq audit --workdir=WORKDIR/private/audit --config.generator=GENERATOR \
        --config.canaries=WORKDIR/private/canaries --config.synthetic=SET

Attacks a generator that was trained on the output of `canaries`, and its set, as the
set's receivers would. Writes `audit.json`:

    canaries    ranks of the secrets among candidates, exposure, and the share that can
                be read in the set, by form and repetitions (`evaluation.memorization`)
    one_run     a lower bound on ε at δ, from the canaries with a coin; see
                `evaluation.audit_one_run` for what it means
    membership  how well attacks tell training queries from those of other splits

Entries of `canaries` share 1 - confidence among them, and so do those of `one_run`,
which refutes no guarantee of shuffled batches. A guarantee for one query counts a
secret in r queries as r units; one for a user counts it as one for any r.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from tfdpsq import evaluation
from tfdpsq.data.io import write_json
from tfdpsq.run.common import canary_set
from tfdpsq.run.common.audited import Subject, members_of
from tfdpsq.run.common.kinds import Generator, Pairs, SyntheticSet
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

AUDIT_FILE = "audit.json"
CONFIDENCE = 0.95
# Shares of the coins' canaries guessed in, and out: fixed before the outcome is seen.
GUESSES = (0.05, 0.2)
_TOP = 10  # ranks that count as a hit, of 20 candidates or more


class Audit(Stage):
    """Attacks a generator that was trained on canaries."""

    name = "audit"
    strategies = ("default", "mirrored", "tpu")

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `audit`."""

        canaries: str = path(Artefact)
        generator: str = path(Generator)
        synthetic: str = path(SyntheticSet, "")
        members: int = setting(
            1000, ge=2, help="training queries, compared with as many of other splits"
        )
        batch_size: int = setting(64, ge=1, speed=True)
        seed: int = setting(0, ge=0, le=settings.SEED)
        strict: bool = setting(False, help="refuse reads that no ε covers")

    def check(self, s: Settings, given: Given) -> None:
        """Refuses a generator without weights to compare with, and another's set."""
        generator, synthetic = given["generator"], given["synthetic"]
        if not generator.facts.get("init"):
            raise InputError(
                f"generator is {s.generator}. Give one that finetune trained from a T5."
            )
        known = synthetic is not None and not synthetic.promised
        if known and synthetic.origin != generator.origin:
            raise InputError(
                f"synthetic is {s.synthetic}, with another certificate than "
                f"{s.generator}. Give the set that it wrote, or none."
            )

    def privacy(self, s: Settings, given: Given) -> Privacy:
        """The attacks are measured on private queries."""
        return Privacy.PRIVATE

    def certificate(self, s: Settings, given: Given) -> None:
        """Returns `None`: the generator's guarantee does not cover what this says."""

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """The attacks' scores."""
        return [("a generator's scores of private queries and canaries", AUDIT_FILE)]

    def run(self, c: Context) -> dict[str, Any]:
        """Raises InputError for a generator that was not trained on these canaries."""
        pairs = f"{c.given['canaries'].path}/{canary_set.DATA}"
        _require_trained_on(c.given["generator"].path, Pairs.open(pairs, "canaries"))
        subject = Subject(c)
        of = c.given["generator"].certificate["guarantee"]
        delta = float(of["delta"] or 0.0)  # for ε = ∞ the bound is on pure DP
        found = {
            "epsilon_certified": of["epsilon"],
            "delta": delta,
            "unit": of["unit"],
            "adjacency": of["adjacency"],
            "confidence": CONFIDENCE,
            "canaries": _canaries(subject, of["unit"]),
            "one_run": _one_run(subject, delta),
            "membership": _membership(subject),
        }
        write_json(c.out / AUDIT_FILE, found)
        bounds = [each["epsilon"] for each in found["one_run"].values()]
        return {"epsilon_at_least": max(bounds, default=0.0)}


def _require_trained_on(generator: str, pairs: Any) -> None:
    private = Place.of(generator).private
    stage = records.read_stage(generator) or {"depends": {"inputs": {}}}
    trained = stage["depends"]["inputs"].get("pairs")
    has_key = (private / records.KEY_FILE).is_file()
    if not has_key or trained != pairs.fingerprint(private):
        raise InputError(
            f"{generator} was not trained on {pairs.path} in this workdir. Train one "
            "on them, and audit it there."
        )


def _canaries(subject: Subject, unit: str) -> list[dict[str, Any]]:
    """Returns an entry per number of repetitions and form, and one for all forms."""
    ranked = [canary for canary in subject.made if not canary.coin]
    if not ranked:
        return []
    pairs = [
        subject.pair(canary, secret)
        for canary in ranked
        for secret in (canary.secret, *canary.candidates)
    ]
    scores = subject.scores(pairs).reshape(len(ranked), -1)
    most, seed = scores.shape[1], subject.settings.seed
    ranks = evaluation.canary_ranks(scores[:, 0], scores[:, 1:], seed)
    bits = evaluation.exposure(ranks, most)
    secrets = [canary.secret for canary in ranked]
    texts = [query for _, query in subject.queries or ()]
    leaked = np.array(evaluation.leaked_secrets(secrets, texts))
    forms = np.array([canary.form for canary in ranked])
    repeated = np.array([canary.repetitions for canary in ranked])
    kinds = [*(form for form in canary_set.FORMS if form in forms), "all"]
    groups = list(itertools.product(np.unique(repeated).tolist(), kinds))
    confidence = 1 - (1 - CONFIDENCE) / len(groups)
    found = []
    for repetitions, form in groups:
        rows = (repeated == repetitions) & ((forms == form) | (form == "all"))
        units, own = 1 if unit == "user" else repetitions, ranks[rows]
        share = None if subject.queries is None else float(leaked[rows].mean())
        bound = evaluation.pure_epsilon_bound(own, most, units, _TOP, confidence)
        found.append(
            {
                "form": form,
                "repetitions": repetitions,
                "units": units,
                "ranks": own.tolist(),
                "candidates": most,
                "mean_rank": float(own.mean()),
                "chance": (most + 1) / 2,
                "p_value": evaluation.rank_p_value(own, most),
                "exposure": bits[rows].tolist(),
                "leaked": share,
                "epsilon_pure": bound,
            }
        )
    return found


def _one_run(subject: Subject, delta: float) -> dict[str, Any]:
    """Returns bounds from the canaries with a coin: the model's, and the set's own."""
    coins = [canary for canary in subject.made if canary.coin]
    if not coins:
        return {}
    pairs = [subject.pair(canary) for canary in coins]
    scores = subject.attacked(pairs, "generator", subject.scores(pairs))
    included = np.array([canary.repetitions == 1 for canary in coins])
    guesses = [(max(1, round(share * len(coins))),) * 2 for share in GUESSES]
    confidence = 1 - (1 - CONFIDENCE) / len(scores)
    found = {}
    for name, each in scores.items():
        bound = evaluation.audit_one_run(
            each, included, delta, guesses, confidence, subject.settings.seed
        )
        attack = evaluation.attack_membership(each[included], each[~included])
        found[name] = {**dataclasses.asdict(bound), "auc": _interval(attack.auc)}
    return found


def _membership(subject: Subject) -> dict[str, Any]:
    """Returns how well each score tells training queries from others."""
    s, split = subject.settings, subject.generator.facts["split"]
    members, others = members_of(subject.pairs, split, s.members, s.seed)
    pairs, inside = [*members, *others], np.arange(2 * len(members)) < len(members)
    scores, found = subject.scores(pairs), {}
    _, tokens = subject.preprocessor.queries(pair.query for pair in pairs)
    by_attack = subject.attacked(pairs, "likelihood_ratio", scores)
    for name, each in {"loss": scores / np.asarray(tokens), **by_attack}.items():
        attack = evaluation.attack_membership(each[inside], each[~inside])
        rates = attack.true_positive_rates.items()
        found[name] = {
            "auc": _interval(attack.auc),
            "true_positive_rates": {f"{at:g}": _interval(of) for at, of in rates},
            "members": attack.members,
            "others": attack.others,
        }
    return found


def _interval(of: evaluation.Interval) -> list[float]:
    return [of.mean, of.low, of.high]


STAGE = Audit()
