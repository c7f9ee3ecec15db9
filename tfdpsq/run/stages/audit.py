r"""Measure what a generator, and the set that it wrote, leak about training queries.

    tfdpsq audit --workdir=WORKDIR/private/audit --config.generator=GENERATOR \
        --config.canaries=WORKDIR/private/canaries --config.synthetic=SET

Attacks a generator that was trained on the output of `canaries`, and its set, as the
set's receivers would. Writes `audit.json`:

    canaries    ranks of the secrets among candidates, exposure, and the share that was
                written out, by form and repetitions (`evaluation.memorization`)
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import CHRF

from tfdpsq import evaluation
from tfdpsq.data import BeirDirectory, read_synthetic
from tfdpsq.data.beir import PairTable
from tfdpsq.data.io import write_json
from tfdpsq.data.texts import Document, Pair
from tfdpsq.generator import Preprocessor, QueryLikelihood, T5QueryGenerator, TopP
from tfdpsq.run.common import canary_set
from tfdpsq.run.common.canary_set import Canary
from tfdpsq.run.frame import records, settings
from tfdpsq.run.frame.artefacts import Artefact, Generator, Pairs, SyntheticSet
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
        samples_per_document: int = setting(
            20, ge=1, help="queries written for a canary's document to find its secret"
        )
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


class Subject:
    """The generator under audit, the weights it started from, and its set."""

    def __init__(self, c: Context):
        """Loads models and texts; raises InputError if training cut secrets off."""
        self.c, canaries = c, c.given["canaries"].path
        self.made = canary_set.read_canaries(canaries)
        self.pairs = BeirDirectory(f"{canaries}/{canary_set.DATA}")
        generator = c.given["generator"]
        with c.scope():
            self.model = T5QueryGenerator.from_preset(generator.path)
            start = T5QueryGenerator.from_preset(generator.facts["init"])
            own: Any = self.model.preprocessor
            size = c.settings.batch_size
            self._own = QueryLikelihood(self.model, own, size)
            self._start = QueryLikelihood(start, own, size)
        wanted = {canary.document_id for canary in self.made}
        documents = self.pairs.documents()
        self.documents = {d.id: d.content for d in documents if d.id in wanted}
        require_whole(self.made, self.documents, own)
        self.preprocessor = own
        self.queries: list[tuple[str, str]] | None = None
        if c.given["synthetic"] is not None:
            # Of documents that end with a secret, queries were written with it in view.
            self.queries = [
                (row.document_id, row.query)
                for row in read_synthetic(c.given["synthetic"].path)
                if not row.document_id.startswith(canary_set.ID_PREFIX)
            ]

    def scores(self, pairs: Sequence[Pair], start: bool = False) -> np.ndarray:
        """Returns [pairs] log-likelihoods in nats, under either model."""
        texts = ((pair.document, pair.query) for pair in pairs)
        found = (self._start if start else self._own).scores(texts)
        return np.fromiter(found, np.float64, len(pairs))

    def attacked(
        self, pairs: Sequence[Pair], ratio: str, scores: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns [pairs] scores: of the ratio to the first weights, and of the set."""
        found = {ratio: scores - self.scores(pairs, start=True)}
        if self.queries is None:
            return found
        of_set = _set_scores(self.queries, pairs)
        return {**found, **{f"set_{name}": each for name, each in of_set.items()}}

    def pair(self, canary: Canary, secret: str | None = None) -> Pair:
        """Returns a canary, or one of its candidates, as a pair."""
        text = canary.document(self.documents[canary.document_id], secret)
        return Pair("", canary.query(secret), canary.document_id, text)

    def written(self, made: Sequence[Canary]) -> Iterator[str]:
        """Yields what the generator writes for the documents, without the secrets."""
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
    most, seed = scores.shape[1], subject.c.settings.seed
    ranks = evaluation.canary_ranks(scores[:, 0], scores[:, 1:], seed)
    bits = evaluation.exposure(ranks, most)
    secrets = [canary.secret for canary in ranked]
    leaked = np.array(evaluation.leaked_secrets(secrets, subject.written(ranked)))
    texts = [query for _, query in subject.queries or ()]
    in_set = np.array(evaluation.leaked_secrets(secrets, texts))
    forms = np.array([canary.form for canary in ranked])
    repeated = np.array([canary.repetitions for canary in ranked])
    kinds = [*(form for form in canary_set.FORMS if form in forms), "all"]
    groups = list(itertools.product(np.unique(repeated).tolist(), kinds))
    confidence = 1 - (1 - CONFIDENCE) / len(groups)
    found = []
    for repetitions, form in groups:
        rows = (repeated == repetitions) & ((forms == form) | (form == "all"))
        units, own = 1 if unit == "user" else repetitions, ranks[rows]
        in_the_set = None if subject.queries is None else float(in_set[rows].mean())
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
                "leaked": float(leaked[rows].mean()),
                "leaked_in_set": in_the_set,
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
            each, included, delta, guesses, confidence, subject.c.settings.seed
        )
        attack = evaluation.attack_membership(each[included], each[~included])
        found[name] = {**dataclasses.asdict(bound), "auc": _interval(attack.auc)}
    return found


def _membership(subject: Subject) -> dict[str, Any]:
    """Returns how well each score tells training queries from others."""
    s, split = subject.c.settings, subject.c.given["generator"].facts["split"]
    members, others = _members_of(subject.pairs, split, s.members, s.seed)
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


def require_whole(
    made: Iterable[Canary], documents: Mapping[str, str], preprocessor: Preprocessor
) -> None:
    """Refuses lengths that cut off a secret; `documents` maps ids to contents."""
    encode = preprocessor.tokenizer.encode
    for canary in made:
        if canary.in_document:
            text = canary.document(documents[canary.document_id])
            text, name = preprocessor.prompt + text, "document_length"
        else:
            text, name = canary.query(), "query_length"
        most = getattr(preprocessor, name)
        # One more token shows what would be cut.
        if encode([text], most + 1)[1][0] > most:
            raise InputError(
                f"a canary has more than {name} = {most} tokens, which cuts its secret "
                f"off. Lower document_characters or query_characters, or raise {name}."
            )


def _set_scores(
    queries: Iterable[tuple[str, str]], pairs: Sequence[Pair]
) -> dict[str, np.ndarray]:
    """Scores each pair's query by its similarity to a set's (document id, query).

    "language_model" is the log-likelihood per word under a 3-gram model of the set;
    "nearest" the largest chrF with a query of the set for the same document, or 0.
    """
    texts: list[str] = []
    of_document: dict[str, list[str]] = {pair.document_id: [] for pair in pairs}
    for document_id, query in queries:
        texts.append(query)
        if document_id in of_document:
            of_document[document_id].append(query)
    chrf = CHRF()

    def nearest(pair: Pair) -> float:
        others = of_document[pair.document_id]
        found = (chrf.sentence_score(other, [pair.query]).score for other in others)
        return max(found, default=0.0)

    model = evaluation.NgramModel(texts, 3)
    return {
        "language_model": model.log_likelihoods(pair.query for pair in pairs),
        "nearest": np.array([nearest(pair) for pair in pairs]),
    }


def _members_of(
    beir: BeirDirectory, split: str, most: int, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """Draws queries of a split, and as many of the others, without canaries."""
    random = np.random.default_rng(seed)

    def drawn(splits: Iterable[str]) -> list[tuple[PairTable, int]]:
        rows = [
            (table, row)
            for table in map(beir.pairs, splits)
            for row, (query_id, _) in enumerate(table.ids())
            if not query_id.startswith(canary_set.ID_PREFIX)
        ]
        return [rows[at] for at in random.permutation(len(rows))[:most]]

    inside = drawn([split])
    outside = drawn(other for other in beir.splits() if other != split)
    count = min(len(inside), len(outside))
    if count < 2:
        raise InputError(
            f"split {split!r} has {len(inside)} queries and the others "
            f"{len(outside)}. Give data with 2 of each."
        )
    members, others = (
        [table[row] for table, row in rows[:count]] for rows in (inside, outside)
    )
    return members, others


STAGE = Audit()
