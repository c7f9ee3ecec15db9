r"""Measure what a generator, and the set that it wrote, leak about training queries.

    tfdpsq audit --workdir=WORKDIR/private/audit --config.generator=GENERATOR \
        --config.canaries=WORKDIR/private/canaries --config.synthetic=SET

Attacks a generator that was trained on the output of `canaries` and, if `synthetic` is
given, that set as well, as its receivers would. Writes `audit.json`:

    canaries    ranks, exposure, and the share of secrets found in generated queries
    one_run     a lower bound on ε at δ, from the canaries inserted by coins
    membership  how well attacks tell training queries from held-out ones
    unit        the unit of the audited guarantee: "query", "pair" or "user"
    adjacency   its neighbouring data, in words

A guarantee for one query counts a secret in r queries as r units: it has r·ε only at a
δ of up to r·e^((r-1)ε) times as much, which soon promises nothing. A guarantee for one
user counts it as one unit for any r: all queries of a canary belong to one user.

The first two show what was learnt of examples made to be remembered, the third of real
queries. None of them proves that a guarantee holds; `one_run` can refute one, but not
one of shuffled batches: that is for a unit which is replaced by nothing, and canaries
that a coin kept out have no place.
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
from tfdpsq.generator import Preprocessor, QueryLikelihood, T5QueryGenerator, TopP
from tfdpsq.privacy.proof.certificate import parents_of
from tfdpsq.run.common import attacks, canary_set
from tfdpsq.run.common.canary_set import Canary
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.artefacts import (
    Canaries,
    Generator,
    Pairs,
    SyntheticSet,
)
from tfdpsq.run.frame.places import Place, Privacy
from tfdpsq.run.frame.runner import Context, Given, Stage
from tfdpsq.run.frame.settings import Rule, path, setting
from tfdpsq.validation import InputError

AUDIT_FILE = "audit.json"


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
        references: tuple[str, ...] = path(
            Generator,
            (),
            help="generators that saw none of the private queries, which scores are "
            "relative to; () is the weights that the generator started from",
        )
        guesses: tuple[tuple[float, float], ...] = setting(
            ((0.05, 0.05), (0.2, 0.2)),
            of=Rule(),
            help="shares of the canaries with a coin that are guessed to be in, and "
            "out, fixed before their outcome is seen",
        )
        samples_per_document: int = setting(
            20, ge=1, help="queries written for a canary's document to find its secret"
        )
        members: int = setting(
            1000, ge=2, help="training queries, compared with as many of other_splits"
        )
        other_splits: tuple[str, ...] = setting(("dev", "test"), of=Rule())
        top: int = setting(10, ge=1, le=10_000, help="ranks that count as a hit")
        confidence: float = setting(0.95, gt=0.5, lt=1)
        batch_size: int = setting(64, ge=1, speed=True)
        seed: int = setting(0, ge=0, le=settings.SEED)
        strict: bool = setting(False, help="refuse reads that no ε covers")

    def check(self, s: Settings, given: Given) -> None:
        """Refuses what cannot be asked of these canaries and this generator."""
        asked, trained = given["canaries"].facts, given["generator"].facts
        if not {"split", "unit", "init"} <= trained.keys():
            raise InputError(
                f"generator is {s.generator}, which is no generator that finetune "
                "trained. Give one that was trained on the canaries."
            )
        if not (asked["coins"] or asked["candidates"]):
            raise InputError(
                f"canaries is {s.canaries}, which holds none. Make canaries again, "
                "with trials or coins above 0."
            )
        if 0 < asked["candidates"] <= s.top:
            raise InputError(
                f"top is {s.top}, but a canary's secret has {asked['candidates']} "
                "candidates, itself among them: every secret would be a hit. Lower "
                "top, or make canaries with more candidates."
            )
        attacks.guesses_of(s.guesses, asked["coins"])
        if not s.references and not trained["init"]:
            raise InputError(
                "references is (), and the generator started from random weights, "
                "which are no reference. Name generators that saw no private query, "
                "such as one trained on public pairs."
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
        found = {} if c.settings.references else dict(enumerate(_references(c)))
        return {
            f"reference.{n}": one.fingerprint(c.place.private)
            for n, one in found.items()
        }

    def run(self, c: Context) -> dict[str, Any]:
        """Raises InputError for a generator that was not trained on these canaries."""
        made = canary_set.read_canaries(c.given["canaries"].path)
        _require_trained_on(c)
        if c.given["synthetic"] is not None:
            _require_own_set(c)
        subject = load(c, made)
        attacks.require_whole(made, subject.documents, subject.preprocessor)
        guarantee = _guarantee(c.given["generator"].certificate)
        # Without a claim (ε = ∞) the bound is on pure DP.
        delta = float(guarantee["delta"] or 0.0)
        found = {
            "epsilon_certified": guarantee["epsilon"],
            "delta": delta,
            "unit": guarantee["unit"],
            "adjacency": guarantee.get("adjacency"),
            "confidence": c.settings.confidence,
            "canaries": _canaries(subject, [x for x in made if not x.coin], guarantee),
            "one_run": _one_run(subject, [x for x in made if x.coin], delta),
            "membership": _membership(subject),
            "rules": _rules(c.settings),
        }
        write_json(c.out / AUDIT_FILE, found)
        return {"one_run": found["one_run"], "delta": delta}

    def line(self, record: Mapping[str, Any]) -> str:
        """The best bound."""
        bounds = (each["epsilon"] for each in record["result"]["one_run"].values())
        best = max(bounds, default=None)
        return "" if best is None else f"epsilon at least {best:.3g}"


# -- What is attacked --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Subject:
    """A generator under audit.

    Attributes:
      c: what the stage runs with.
      model: the generator.
      preprocessor: its own, and that of the references.
      likelihood: scores queries under it.
      references: score them under models that saw none of them.
      documents: id -> content of the documents of canaries.
      queries: (document id, query) of the synthetic set; `None` without one.
    """

    c: Context
    model: T5QueryGenerator
    preprocessor: Preprocessor
    likelihood: QueryLikelihood
    references: Sequence[QueryLikelihood]
    documents: Mapping[str, str]
    queries: Sequence[tuple[str, str]] | None

    def scores(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Returns [pairs] log-likelihoods, in nats."""
        return attacks.log_likelihoods(self.likelihood, pairs)

    def ratios(self, pairs: Sequence[Pair], scores: np.ndarray) -> np.ndarray:
        """Returns [pairs] log-likelihood ratios of generator and references."""
        others = [attacks.log_likelihoods(each, pairs) for each in self.references]
        return evaluation.likelihood_ratio_scores(scores, np.stack(others))

    def pair(self, canary: Canary, secret: str | None = None) -> Pair:
        """Returns a canary, or one of its candidates, as a pair."""
        document = self.documents[canary.document_id]
        text = canary.document(document, secret)
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
        s = self.c.settings
        ids = (canary.document_id for canary in made)
        with self.c.scope():
            rows = self.model.write_queries(
                [Document(each, "", self.documents[each]) for each in ids],
                TopP(0.8),  # the paper's
                seed=s.seed,
                samples=s.samples_per_document,
                batch_size=s.batch_size,
            )
        for row in rows:
            yield row.query


def load(c: Context, made: Sequence[Canary]) -> Subject:
    """Loads the models, and the documents of the canaries."""
    s = c.settings
    with c.scope():
        model = T5QueryGenerator.from_preset(c.given["generator"].path)
        own, references = model.preprocessor, []
        assert own is not None  # finetune writes one
        for reference in _references(c):
            other = T5QueryGenerator.from_preset(reference.path)
            held = other.preprocessor
            if not held or held.tokenizer.fingerprint != own.tokenizer.fingerprint:
                raise InputError(
                    f"the reference {reference.path} has another vocabulary than "
                    f"{s.generator}, or none, so it scores other words. Name one that "
                    "started from the same weights."
                )
            references.append(QueryLikelihood(other, own, s.batch_size))
        scorer = QueryLikelihood(model, batch_size=s.batch_size)
    wanted = {canary.document_id for canary in made}
    documents = _pairs(c).beir().documents()
    texts, given = {d.id: d.content for d in documents if d.id in wanted}, None
    if c.given["synthetic"] is not None:
        rows = read_synthetic(c.given["synthetic"].path)
        given = [(row.document_id, row.query) for row in rows]
        # Of documents that end with a secret, queries were written with it in view.
        given = [row for row in given if not row[0].startswith(canary_set.ID_PREFIX)]
    return Subject(c, model, own, scorer, references, texts, given)


def _pairs(c: Context) -> Any:
    """Opens the pairs with canaries."""
    return Pairs.open(f"{c.given['canaries'].path}/{canary_set.DATA}", "canaries")


def _references(c: Context) -> Sequence[Any]:
    """Returns the references, or the weights that the generator started from."""
    init = c.given["generator"].facts["init"]
    return c.given["references"] or [Generator.open(init, "the generator's init")]


def _require_trained_on(c: Context) -> None:
    """Refuses a generator that was not trained on these canaries."""
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


def _require_own_set(c: Context) -> None:
    """Refuses a set that another generator wrote."""
    given = c.given["synthetic"].path
    made = read_manifest(given)["provenance"]
    while "of" in made:  # filtered
        made = made["of"]
    if made.get("inputs", {}).get("generator") != c.inputs["generator"]:
        raise InputError(
            f"{given} was not written by {c.settings.generator}, by its manifest.json, "
            "so the audit would mix two generators. Give the set that this generator "
            "wrote, or no set."
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


def _canaries(
    subject: Subject, ranked: Sequence[Canary], guarantee: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns an entry per number of repetitions and form, and one for all forms."""
    if not ranked:
        return []
    s = subject.c.settings
    pairs = [
        subject.pair(canary, secret)
        for canary in ranked
        for secret in (canary.secret, *canary.candidates)
    ]
    scores = subject.scores(pairs).reshape(len(ranked), -1)
    candidates = scores.shape[1]
    ranks = evaluation.canary_ranks(scores[:, 0], scores[:, 1:], s.seed)
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
    confidence = 1 - (1 - s.confidence) / len(groups)
    found, epsilon = [], float(guarantee["epsilon"])
    for repetitions, form in groups:
        units = 1 if guarantee["unit"] == "user" else repetitions
        rows = [
            row
            for row, canary in enumerate(ranked)
            if canary.repetitions == repetitions and form in (canary.form, "all")
        ]
        shown_in_set = float(np.mean([in_set[row] for row in rows]))
        found.append(
            {
                "form": form,
                "repetitions": repetitions,
                "units": units,
                "ranks": ranks[rows].tolist(),
                "candidates": candidates,
                "mean_rank": float(ranks[rows].mean()),
                "chance": (candidates + 1) / 2,
                "least_mean_rank": evaluation.least_mean_rank(
                    units * epsilon, candidates
                ),
                "p_value": evaluation.rank_p_value(ranks[rows], candidates),
                "exposure": bits[rows].tolist(),
                "leaked": float(np.mean([leaked[row] for row in rows])),
                "leaked_in_set": None if subject.queries is None else shown_in_set,
                "epsilon_pure": evaluation.pure_epsilon_bound(
                    ranks[rows], candidates, units, s.top, confidence
                ),
            }
        )
    return found


def _one_run(subject: Subject, coins: Sequence[Canary], delta: float) -> dict[str, Any]:
    """Returns bounds from the canaries with a coin: the model's, and the set's own."""
    if not coins:
        return {}
    s = subject.c.settings
    pairs = [subject.pair(canary) for canary in coins]
    ratios = subject.ratios(pairs, subject.scores(pairs))
    scores = {"generator": ratios, **subject.set_scores(pairs)}
    included = np.array([canary.repetitions == 1 for canary in coins])
    guesses = attacks.guesses_of(s.guesses, len(coins))
    confidence = 1 - (1 - s.confidence) / len(scores)
    found = {}
    for name, each in scores.items():
        bound = evaluation.audit_one_run(
            each, included, delta, guesses, confidence, s.seed
        )
        attack = evaluation.attack_membership(
            each[included], each[~included], confidence=s.confidence
        )
        found[name] = {**dataclasses.asdict(bound), "auc": _interval(attack.auc)}
    return found


def _membership(subject: Subject) -> dict[str, Any]:
    """Returns how well each score tells training queries from others."""
    s, own = subject.c.settings, subject.preprocessor
    split = subject.c.given["generator"].facts["split"]
    members, others = attacks.members_of(
        _pairs(subject.c).beir(), split, s.other_splits, s.members, s.seed
    )
    pairs = [*members, *others]
    scores = subject.scores(pairs)
    _, tokens = own.queries(pair.query for pair in pairs)
    by_attack = {
        "loss": scores / np.asarray(tokens),
        "likelihood_ratio": subject.ratios(pairs, scores),
        **subject.set_scores(pairs),
    }
    found = {}
    for name, each in by_attack.items():
        inside, outside = each[: len(members)], each[len(members) :]
        attack = evaluation.attack_membership(inside, outside, confidence=s.confidence)
        found[name] = {
            "auc": _interval(attack.auc),
            "true_positive_rates": {
                f"{rate:g}": _interval(share)
                for rate, share in attack.true_positive_rates.items()
            },
            "members": attack.members,
            "others": attack.others,
        }
    return found


def _interval(of: evaluation.Interval) -> list[float]:
    return [of.mean, of.low, of.high]


def _rules(s: Any) -> dict[str, str]:
    return {
        "rank": "of the secret among all candidates by likelihood, 1 is likeliest, "
        "ties at random",
        "p_value": "probability of as low a mean rank if every rank is uniform, exact, "
        "one-sided",
        "exposure": "log2(candidates) - log2(rank), in bits",
        "leaked": f"the secret's digits in one of {s.samples_per_document} queries "
        "written for each canary's document, without the secret in it",
        "leaked_in_set": "the same in the synthetic set, as it would be released",
        "units": "of the guarantee that each secret is: all its queries under unit "
        "query or pair, 1 under unit user. By group privacy the secret has units * "
        "epsilon",
        "least_mean_rank": "that even pure DP of units * epsilon would promise, so no "
        "promise of the certificate is higher: evaluation.least_mean_rank",
        "epsilon_pure": "lower bound on the epsilon of pure DP for one unit, from "
        f"secrets that rank {s.top} or better: evaluation.pure_epsilon_bound; the "
        "entries share 1 - confidence among them",
        "one_run": "lower bound on epsilon at delta: evaluation.audit_one_run; the "
        "attacks share 1 - confidence among them. auc: how well the scores tell "
        "canaries put in from those left out, with its interval",
        "membership": "training queries against held-out ones of other splits: "
        "evaluation.attack_membership",
    }


STAGE = Audit()
