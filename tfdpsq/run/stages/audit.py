r"""Measure what a generator, and the set that it wrote, leak about training queries.

    tfdpsq audit --workdir=WORKDIR/private/audit --config.generator=GENERATOR \
        --config.canaries=WORKDIR/private/canaries --config.synthetic=SET

Attacks a generator that was trained on the output of `canaries` and, if `synthetic` is
given, that set as well, as its receivers would. Writes `audit.json`:

    canaries    by form and repetitions: ranks of secrets among candidates, exposure,
                the share written out for documents without the secret ("leaked"), and a
                lower bound on the ε of pure DP (see `evaluation.memorization`)
    one_run     a lower bound on ε at δ, from the canaries inserted by coins
    membership  how well attacks tell training queries from those of other splits
    unit, adjacency, epsilon_certified, delta: of the audited guarantee

Entries of `canaries` share 1 - confidence among them, and so do those of `one_run`.

A guarantee for one query counts a secret in r queries as r units: it has r·ε only at a
δ of up to r·e^((r-1)ε) times as much, which soon promises nothing. A guarantee for one
user counts it as one unit for any r: all queries of a canary belong to one user.

None of this proves that a guarantee holds; `one_run` can refute one, but not one of
shuffled batches: that is for a unit which is replaced by nothing, and canaries that a
coin kept out have no place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdpsq import evaluation
from tfdpsq.data import read_manifest, read_synthetic
from tfdpsq.data.io import write_json
from tfdpsq.data.texts import Document, Pair
from tfdpsq.generator import QueryLikelihood, T5QueryGenerator, TopP
from tfdpsq.privacy.proof.certificate import parents_of
from tfdpsq.run.common import attacks, canary_set
from tfdpsq.run.common.canary_set import Canary
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.artefacts import Canaries, Generator, Pairs, SyntheticSet
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

AUDIT_FILE = "audit.json"
CONFIDENCE = 0.95
# Shares of the canaries with a coin that are guessed to be in, and as many out: fixed
# before their outcome is seen.
GUESSES = (0.05, 0.2)
_TOP = 10  # ranks that count as a hit, of 20 candidates or more


class Audit(Stage):
    """Attacks a generator that was trained on canaries."""

    name = "audit"
    strategies = ("default", "mirrored", "tpu")

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `audit`."""

        canaries: str = path(Canaries)
        generator: str = path(Generator)
        synthetic: str = path(SyntheticSet, "")
        samples_per_document: int = setting(
            20, ge=1, help="queries written for a canary's document to find its secret"
        )
        members: int = setting(
            1000, ge=2, help="training queries, compared with as many of other splits"
        )
        batch_size: int = setting(64, ge=1, speed=True)
        seed: int = setting(0, ge=0, le=settings.SEED)

    def check(self, s: Settings, given: Given) -> None:
        """Refuses what cannot be asked of these canaries and this generator."""
        asked, trained = given["canaries"].facts, given["generator"].facts
        if not trained.get("init"):
            raise InputError(
                f"generator is {s.generator}, which finetune did not train from a T5. "
                "Give one that was trained on the canaries."
            )
        if not (asked["coins"] or asked["candidates"]):
            raise InputError(
                f"canaries is {s.canaries}, which holds none. Make canaries again, "
                "with trials or coins above 0."
            )

    def privacy(self, s: Settings, given: Given) -> Privacy:
        """Returns PRIVATE: attacks are measured on private queries."""
        return Privacy.PRIVATE

    def certificate(self, s: Settings, given: Given) -> None:
        """Returns `None`: the generator's guarantee does not cover what this says."""

    def reads(self, s: Settings, given: Given) -> list[tuple[str, str]]:
        """The attacks' scores."""
        scores = "how likely a generator finds training queries, held-out queries and "
        return [(f"{scores}canaries", AUDIT_FILE)]

    def also(self, c: Context) -> dict[str, str]:
        """The weights that the generator started from are an input, too."""
        return {"reference": _reference(c).fingerprint(c.place.private)}

    def run(self, c: Context) -> dict[str, Any]:
        """Raises InputError for a generator that was not trained on these canaries."""
        _require_own(c)
        subject = Subject(c)
        guarantee = _guarantee(c.given["generator"].certificate)
        # Without a claim (ε = ∞) the bound is on pure DP.
        delta = float(guarantee["delta"] or 0.0)
        one_run = _one_run(subject, delta)
        found = {
            "epsilon_certified": guarantee["epsilon"],
            "delta": delta,
            "unit": guarantee["unit"],
            "adjacency": guarantee.get("adjacency"),
            "confidence": CONFIDENCE,
            "canaries": _canaries(subject, guarantee),
            "one_run": one_run,
            "membership": _membership(subject),
        }
        write_json(c.out / AUDIT_FILE, found)
        return {"one_run": one_run, "delta": delta}

    def line(self, record: Mapping[str, Any]) -> str:
        """The best bound."""
        bounds = (each["epsilon"] for each in record["result"]["one_run"].values())
        best = max(bounds, default=None)
        return "" if best is None else f"epsilon at least {best:.3g}"


class Subject:
    """The generator under audit, the weights it started from, and its set.

    Attributes:
      c: what the stage runs with.
      pairs: those with the canaries.
      made: the canaries.
      model: the generator, with its preprocessor.
      documents: id -> content of the documents of canaries.
      queries: (document id, query) of the synthetic set; `None` without one.
    """

    def __init__(self, c: Context):
        """Loads models and texts; raises InputError if training cut secrets off."""
        self.c, self.pairs = c, _pairs(c).beir()
        self.made = canary_set.read_canaries(c.given["canaries"].path)
        with c.scope():
            self.model = T5QueryGenerator.from_preset(c.given["generator"].path)
            other = T5QueryGenerator.from_preset(_reference(c).path)
            own = self.model.preprocessor
            size = c.settings.batch_size
            self._likelihood = QueryLikelihood(self.model, batch_size=size)
            self._reference = QueryLikelihood(other, own, size)
        wanted = {canary.document_id for canary in self.made}
        documents = self.pairs.documents()
        self.documents = {d.id: d.content for d in documents if d.id in wanted}
        attacks.require_whole(self.made, self.documents, own)
        self.queries: list[tuple[str, str]] | None = None
        if c.given["synthetic"] is not None:
            # Of documents that end with a secret, queries were written with it in view.
            self.queries = [
                (row.document_id, row.query)
                for row in read_synthetic(c.given["synthetic"].path)
                if not row.document_id.startswith(canary_set.ID_PREFIX)
            ]

    def scores(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Returns [pairs] log-likelihoods, in nats."""
        return attacks.log_likelihoods(self._likelihood, pairs)

    def ratios(self, pairs: Sequence[Pair], scores: np.ndarray) -> np.ndarray:
        """Returns [pairs] log-likelihood ratios to the weights it started from."""
        return scores - attacks.log_likelihoods(self._reference, pairs)

    def pair(self, canary: Canary, secret: str | None = None) -> Pair:
        """Returns a canary, or one of its candidates, as a pair."""
        text = canary.document(self.documents[canary.document_id], secret)
        return Pair("", canary.query(secret), canary.document_id, text)

    def set_scores(self, pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        """Returns the scores under the synthetic set, if there is one."""
        if self.queries is None:
            return {}
        found = attacks.set_scores(self.queries, pairs)
        return {f"set_{name}": values for name, values in found.items()}

    def written(self, made: Sequence[Canary]) -> Iterator[str]:
        """Yields queries that the generator writes for canaries' documents.

        For the documents without the secret, which would otherwise only be copied.
        """
        s, ids = self.c.settings, [canary.document_id for canary in made]
        with self.c.scope():
            rows = self.model.write_queries(
                [Document(each, "", self.documents[each]) for each in ids],
                TopP(0.8),  # the paper's
                seed=s.seed,
                samples=s.samples_per_document,
                batch_size=s.batch_size,
            )
        return (row.query for row in rows)


def _pairs(c: Context) -> Any:
    """Opens the pairs with canaries."""
    return Pairs.open(f"{c.given['canaries'].path}/{canary_set.DATA}", "canaries")


def _reference(c: Context) -> Any:
    """Opens the weights that the generator started from."""
    return Generator.open(c.given["generator"].facts["init"], "the generator's init")


def _require_own(c: Context) -> None:
    """Refuses a generator that was not trained on these canaries, or another's set."""
    generator, pairs = c.given["generator"].path, _pairs(c)
    private = Place.of(generator).private
    inputs = (records.read_stage(generator) or {"depends": {}})["depends"]["inputs"]
    has_key = (private / records.KEY_FILE).is_file()
    if not has_key or inputs.get("pairs") != pairs.fingerprint(private):
        raise InputError(
            f"{generator} was not trained on {pairs.path}, by its {records.STAGE_FILE} "
            f"and {private / records.KEY_FILE}: secrets must be put in before "
            "training. Train a generator on them, and audit it where it was trained."
        )
    if c.given["synthetic"] is None:
        return
    made = read_manifest(c.given["synthetic"].path)["provenance"]
    while "of" in made:  # filtered
        made = made["of"]
    if made.get("inputs", {}).get("generator") != c.inputs["generator"]:
        raise InputError(
            f"synthetic is {c.settings.synthetic}, which {generator} did not write, by "
            "its manifest.json. Give the set that this generator wrote, or no set."
        )


def _guarantee(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the guarantee of the run that the canaries were put into.

    A generator that continued others states the ε of all runs; the canaries' queries
    were in the last one alone, unless an earlier one was trained on these pairs.
    """
    found = dict(certificate["guarantee"])
    pairs, *before = (
        each["fingerprints"].get("pairs")
        for each in (certificate, *parents_of(certificate))
    )
    own = certificate.get("continuation")
    if own and pairs not in before:
        found["epsilon"] = own["epsilon_of_this_run"]
        found["delta"] = own["delta_of_this_run"]
    return found


# -- The attacks -------------------------------------------------------------------


def _canaries(subject: Subject, guarantee: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    candidates = scores.shape[1]
    seed = subject.c.settings.seed
    ranks = evaluation.canary_ranks(scores[:, 0], scores[:, 1:], seed)
    bits = evaluation.exposure(ranks, candidates)
    secrets = [canary.secret for canary in ranked]
    leaked = evaluation.leaked_secrets(secrets, subject.written(ranked))
    texts = [query for _, query in subject.queries or ()]
    in_set = evaluation.leaked_secrets(secrets, texts)
    forms = {canary.form for canary in ranked}
    groups = [
        (repetitions, form)
        for repetitions in sorted({canary.repetitions for canary in ranked})
        for form in (*(f for f in canary_set.FORMS if f in forms), "all")
    ]
    confidence = 1 - (1 - CONFIDENCE) / len(groups)
    found = []
    for repetitions, form in groups:
        units = 1 if guarantee["unit"] == "user" else repetitions
        rows = [
            row
            for row, canary in enumerate(ranked)
            if canary.repetitions == repetitions and form in (canary.form, "all")
        ]
        own = ranks[rows]
        shown_in_set = float(np.mean([in_set[row] for row in rows]))
        bound = (own, candidates, units, _TOP, confidence)
        entry = {
            "form": form,
            "repetitions": repetitions,
            "units": units,
            "ranks": own.tolist(),
            "candidates": candidates,
            "mean_rank": float(own.mean()),
            "chance": (candidates + 1) / 2,
            "p_value": evaluation.rank_p_value(own, candidates),
            "exposure": bits[rows].tolist(),
            "leaked": float(np.mean([leaked[row] for row in rows])),
            "leaked_in_set": None if subject.queries is None else shown_in_set,
            "epsilon_pure": evaluation.pure_epsilon_bound(*bound),
        }
        found.append(entry)
    return found


def _one_run(subject: Subject, delta: float) -> dict[str, Any]:
    """Returns bounds from the canaries with a coin: the model's, and the set's own."""
    coins = [canary for canary in subject.made if canary.coin]
    if not coins:
        return {}
    pairs = [subject.pair(canary) for canary in coins]
    ratios = subject.ratios(pairs, subject.scores(pairs))
    scores = {"generator": ratios, **subject.set_scores(pairs)}
    included = np.array([canary.repetitions == 1 for canary in coins])
    guesses = [(max(1, round(share * len(coins))),) * 2 for share in GUESSES]
    confidence = 1 - (1 - CONFIDENCE) / len(scores)
    found = {}
    for name, each in scores.items():
        bound = evaluation.audit_one_run(
            each, included, delta, guesses, confidence, subject.c.settings.seed
        )
        attack = evaluation.attack_membership(each[included], each[~included])
        found[name] = {**dataclasses.asdict(bound), "auc": _interval(attack.auc)}
    return found


def _membership(subject: Subject) -> dict[str, Any]:
    """Returns how well each score tells training queries from others."""
    s, split = subject.c.settings, subject.c.given["generator"].facts["split"]
    members, others = attacks.members_of(subject.pairs, split, s.members, s.seed)
    pairs = [*members, *others]
    scores = subject.scores(pairs)
    _, tokens = subject.model.preprocessor.queries(pair.query for pair in pairs)
    by_attack = {
        "loss": scores / np.asarray(tokens),
        "likelihood_ratio": subject.ratios(pairs, scores),
        **subject.set_scores(pairs),
    }
    found = {}
    for name, each in by_attack.items():
        inside, outside = each[: len(members)], each[len(members) :]
        attack = evaluation.attack_membership(inside, outside)
        rates = attack.true_positive_rates.items()
        found[name] = {
            "auc": _interval(attack.auc),
            "true_positive_rates": {f"{at:g}": _interval(each) for at, each in rates},
            "members": attack.members,
            "others": attack.others,
        }
    return found


def _interval(of: evaluation.Interval) -> list[float]:
    return [of.mean, of.low, of.high]


STAGE = Audit()
