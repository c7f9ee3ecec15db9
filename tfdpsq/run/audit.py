r"""Measure what a generator, and the set that it wrote, leak about training queries.

    python -m tfdpsq.run.audit --workdir=WORKDIR/private/audit \
        --config.canaries=WORKDIR/private/canaries --config.generator=GENERATOR \
        --config.synthetic=SET

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
that a coin kept out have no place. All are computed from private queries, recorded as
reads, and belong under `private/`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import evaluation, validation
from tfdpsq.data.io import write_json
from tfdpsq.data.texts import Pair
from tfdpsq.generator import checkpoints
from tfdpsq.run.attacks import audit_subject, canary_set, text_scores
from tfdpsq.run.core import (
    command,
    layout,
    pipeline_data,
    records,
    releases,
    settings,
    sources,
    workdir,
)

_SHARES = settings.Several((), settings.Number(0.0, 0, 1), 2, 2)
SETTINGS: settings.Declaration = {
    "canaries": settings.Text(""),
    "generator": settings.Text(""),
    "synthetic": settings.Text(""),
    "references": settings.Several((), settings.Text("", required=True)),
    "guesses": settings.Several(((0.05, 0.05), (0.2, 0.2)), _SHARES),
    "samples_per_document": settings.Integer(20, 1, 1000000),
    "members": settings.Integer(1000, 2, remedy="A comparison takes 2 of each."),
    "other_splits": settings.Several(
        ("dev", "test"), settings.Text("", required=True), 1
    ),
    "top": settings.Integer(10, 1, 10000),
    "confidence": settings.Number(0.95, 0.5, 1, low_open=True, high_open=True),
    "batch_size": settings.Integer(64),
    "seed": settings.Integer(0, 0, settings.SEED),
    "strict": settings.Flag(False),
    "private_directory": settings.Text(""),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the stage's settings.

    `references` are generators that saw none of the private queries in question, by
    default the public weights that the generator started from; membership scores are
    relative to them. `guesses` are the shares of the canaries with a coin that are
    guessed to be in, and out, fixed before their outcome is seen.
    `samples_per_document` queries are written for each canary's document to find its
    secret. `members` training queries are compared with as many of `other_splits`.
    """
    return settings.default_config(SETTINGS)


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings, a generator that was not trained on these canaries, or
        strict mode.
      DataError: malformed data.
    """
    settings.check(config, SETTINGS)
    output = releases.Output(
        directory,
        releases.PRIVATE,
        "how well attacks find training queries",
        config.private_directory,
    )
    _check(config)
    private = releases.private_directory(directory, config.private_directory)
    made = canary_set.read_canaries(pathlib.Path(config.canaries))
    if not made:
        raise validation.InputError(
            f"{config.canaries} holds no canary, so there is nothing to look for. Make "
            "canaries again, with trials or coins above 0."
        )
    check_settings(
        config,
        sum(canary.coin for canary in made),
        min(
            (1 + len(canary.candidates) for canary in made if not canary.coin),
            default=0,
        ),
    )
    trained = audit_subject.training_of(config.generator, config.canaries)
    data = audit_subject.data_of(config.canaries)
    canary_set.require_inserted(config.canaries, made, data, trained.split)
    audit_subject.certificate_of(config.generator)
    references = tuple(config.references) or (trained.init,)
    if not all(references):
        raise validation.InputError(
            f"{config.generator} started from random weights, which are no reference "
            "for scores. Set references to generators that saw no private query, such "
            "as one trained on public pairs."
        )
    inputs = {
        "canaries": workdir.stage_fingerprint(config.canaries),
        "generator": workdir.stage_fingerprint(config.generator),
    }
    vocabulary = sources.vocabulary_file("", config.generator)
    for number, path in enumerate(references):
        # Else its scores are of other words.
        where = f"references[{number}]"
        pipeline_data.require_one_vocabulary(path, str(vocabulary), where)
        inputs[f"reference {number}"] = workdir.model_fingerprint(
            checkpoints.locate(path)
        )
    if config.synthetic:
        audit_subject.require_own_set(config.synthetic, config.generator)
        inputs["synthetic"] = sources.source_fingerprint(config.synthetic, private)
    records.private_reads(private, config.strict).record(
        "how likely a generator finds training queries, held-out queries and canaries",
        f"{directory.name}/{layout.AUDIT_FILE}",
    )

    def make(out: pathlib.Path) -> dict:
        found = _audit(config, made, trained, references)
        write_json(out / layout.AUDIT_FILE, found)
        return {"one_run": found["one_run"], "delta": found["delta"]}

    return workdir.run_stage(output, config, inputs, make)


def _check(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that are wrong, before any data are read."""
    for name, maker in (("canaries", "canaries"), ("generator", "finetune")):
        if not config[name]:
            raise validation.InputError(
                f"{name} is {config[name]!r}. Give the directory that the stage "
                f"{maker} wrote; a generator must have been trained on the canaries."
            )
    check_settings(config, 0, 0)


def check_settings(
    config: ml_collections.ConfigDict, coins: int, candidates: int
) -> None:
    """Refuses what cannot be asked of canaries.

    `coins` is the number of canaries with a coin, and `candidates` that of every other
    canary's secret; 0 where there is none.
    """
    guesses = config.guesses
    if 0 < candidates <= config.top:
        raise validation.InputError(
            f"top is {config.top}, but a canary's secret has {candidates} candidates, "
            "itself among them: every secret would be a hit. Lower top, or make "
            "canaries with more candidates."
        )
    if not guesses and coins:
        raise validation.InputError(
            "guesses is empty, but there are canaries with a coin. Declare at least "
            "one pair of shares to guess in and out, such as ((0.2, 0.2),)."
        )
    for pair in guesses:
        if sum(pair) > 1:
            raise validation.InputError(
                f"guesses holds {tuple(pair)}: nothing can be guessed both in and out. "
                "Let the two shares add up to at most 1."
            )
        if coins and sum(_counts(pair, coins)) > coins:
            raise validation.InputError(
                f"guesses holds {tuple(pair)}, which are {_counts(pair, coins)} of the "
                f"{coins} canaries with a coin: one at least of each, and together "
                "more than there are. Lower one of the shares."
            )


def _counts(pair: Sequence[float], coins: int) -> tuple[int, int]:
    """Returns how many of the coins' canaries are guessed in, and out."""
    guessed_in, guessed_out = (max(1, round(share * coins)) for share in pair)
    return guessed_in, guessed_out


def _audit(config: Any, made: Any, trained: Any, references: Any) -> dict[str, Any]:
    beir = audit_subject.data_of(config.canaries)
    members, others = audit_subject.members_of(
        beir, trained.split, config.other_splits, config.members, config.seed
    )
    subject = audit_subject.load(config, references, made)
    own = subject.likelihood.preprocessor
    text_scores.require_whole_canaries(made, subject.documents.values(), own)
    guarantee = audit_subject.guarantee_of(config.generator)
    # Without a claim (ε = ∞) the bound is on pure DP.
    delta = float(guarantee["delta"] or 0.0)
    return {
        "epsilon_certified": guarantee["epsilon"],
        "delta": delta,
        "unit": guarantee["unit"],
        "adjacency": guarantee.get("adjacency"),
        "confidence": config.confidence,
        "canaries": _canaries(subject, [c for c in made if not c.coin], guarantee),
        "one_run": _one_run(subject, [c for c in made if c.coin], delta),
        "membership": _membership(subject, members, others),
        "rules": {
            "rank": "of the secret among all candidates by likelihood, 1 is likeliest, "
            "ties at random",
            "p_value": "probability of as low a mean rank if every rank is uniform, "
            "exact, one-sided",
            "exposure": "log2(candidates) - log2(rank), in bits",
            "leaked": f"the secret's digits in one of {config.samples_per_document} "
            "queries written for each canary's document, without the secret in it",
            "leaked_in_set": "the same in the synthetic set, as it would be released",
            "units": "of the guarantee that each secret is: all its queries under unit "
            "query or pair, 1 under unit user. By group privacy the secret has units * "
            "epsilon",
            "least_mean_rank": "that even pure DP of units * epsilon would promise, so "
            "no promise of the certificate is higher: evaluation.least_mean_rank",
            "epsilon_pure": "lower bound on the epsilon of pure DP for one unit, from "
            f"secrets that rank {config.top} or better: evaluation.pure_epsilon_bound; "
            "the entries share 1 - confidence among them",
            "one_run": "lower bound on epsilon at delta: evaluation.audit_one_run; "
            "the attacks share 1 - confidence among them. auc: how well the scores "
            "tell canaries put in from those left out, with its interval",
            "membership": "training queries against held-out ones of other splits: "
            "evaluation.attack_membership",
        },
    }


def _canaries(
    subject: audit_subject.Subject,
    ranked: Sequence[canary_set.Canary],
    guarantee: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Returns an entry per number of repetitions and form, and one for all forms."""
    if not ranked:
        return []
    config = subject.config
    pairs = [
        subject.pair(canary, secret)
        for canary in ranked
        for secret in (canary.secret, *canary.candidates)
    ]
    # Secrets are whole, as checked; a query without one is cut as in training.
    scores = subject.likelihood(pairs, cut=True).reshape(len(ranked), -1)
    candidates = scores.shape[1]
    ranks = evaluation.canary_ranks(scores[:, 0], scores[:, 1:], config.seed)
    bits = evaluation.exposure(ranks, candidates)
    secrets = [canary.secret for canary in ranked]
    leaked = evaluation.leaked_secrets(secrets, subject.written(ranked))
    texts = [query for _, query in subject.queries or ()]
    in_set = evaluation.leaked_secrets(secrets, texts)
    found = []
    epsilon = float(guarantee["epsilon"])
    forms = {canary.form for canary in ranked}
    groups = [
        (repetitions, form)
        for repetitions in sorted({canary.repetitions for canary in ranked})
        for form in (*(f for f in canary_set.FORMS if f in forms), "all")
    ]
    confidence = 1 - (1 - config.confidence) / len(groups)
    for repetitions, form in groups:
        units = 1 if guarantee["unit"] == "user" else repetitions
        rows = [
            row
            for row, canary in enumerate(ranked)
            if canary.repetitions == repetitions and form in (canary.form, "all")
        ]
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
                "leaked_in_set": float(np.mean([in_set[row] for row in rows]))
                if subject.queries is not None
                else None,
                "epsilon_pure": evaluation.pure_epsilon_bound(
                    ranks[rows], candidates, units, config.top, confidence
                ),
            }
        )
    return found


def _one_run(
    subject: audit_subject.Subject, coins: Sequence[canary_set.Canary], delta: float
) -> dict[str, Any]:
    """Returns bounds from the canaries with a coin: the model's, and the set's own."""
    if not coins:
        return {}
    config = subject.config
    pairs = [subject.pair(canary) for canary in coins]
    scores = {
        "generator": evaluation.likelihood_ratio_scores(
            subject.likelihood(pairs), subject.reference_scores(pairs)
        ),
        **subject.set_scores(pairs),
    }
    included = np.array([canary.repetitions == 1 for canary in coins])
    guesses = [_counts(pair, len(coins)) for pair in config.guesses]
    confidence = 1 - (1 - config.confidence) / len(scores)
    found = {}
    for name, each in scores.items():
        bound = evaluation.audit_one_run(
            each, included, delta, guesses, confidence, config.seed
        )
        attack = evaluation.attack_membership(
            each[included], each[~included], confidence=config.confidence
        )
        auc = [attack.auc.mean, attack.auc.low, attack.auc.high]
        found[name] = {**dataclasses.asdict(bound), "auc": auc}
    return found


def _membership(
    subject: audit_subject.Subject, members: Sequence[Pair], others: Sequence[Pair]
) -> dict[str, Any]:
    config = subject.config
    pairs = [*members, *others]
    # Truncated as in training.
    target = subject.likelihood(pairs, cut=True)
    own = subject.likelihood.preprocessor
    _, tokens = own.queries(pair.query for pair in pairs)
    scores = {
        "loss": target / np.asarray(tokens),
        "likelihood_ratio": evaluation.likelihood_ratio_scores(
            target, subject.reference_scores(pairs, cut=True)
        ),
        **subject.set_scores(pairs),
    }
    found = {}
    for name, each in scores.items():
        inside, outside = each[: len(members)], each[len(members) :]
        attack = evaluation.attack_membership(
            inside, outside, confidence=config.confidence
        )
        found[name] = {
            "auc": [attack.auc.mean, attack.auc.low, attack.auc.high],
            "true_positive_rates": {
                f"{rate:g}": [share.mean, share.low, share.high]
                for rate, share in attack.true_positive_rates.items()
            },
            "members": attack.members,
            "others": attack.others,
        }
    return found


if __name__ == "__main__":
    command.main(run, runs_models=True)
