"""The subject of the stage `audit`: a generator, and the set that it wrote."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_collections
import numpy as np

from tfdpsq import validation
from tfdpsq.data import BeirDirectory, read_manifest, read_synthetic
from tfdpsq.data.texts import Document, Pair
from tfdpsq.generator import T5QueryGenerator, TopP
from tfdpsq.privacy import read_certificate
from tfdpsq.privacy.proof.certificate import parents_of
from tfdpsq.run.attacks import canary_set, text_scores
from tfdpsq.run.core import releases, sources, workdir
from tfdpsq.run.devices import strategy


@dataclasses.dataclass(frozen=True)
class Subject:
    """A generator under audit, ready to score.

    Attributes:
      config: the stage's.
      model: the generator.
      likelihood: scores pairs under the generator.
      references: score pairs under models that saw none of the queries.
      documents: id -> document, for the documents of canaries.
      queries: (document id, query) of the synthetic set; `None` without one.
    """

    config: ml_collections.ConfigDict
    model: T5QueryGenerator
    likelihood: text_scores.LikelihoodScorer
    references: Sequence[text_scores.LikelihoodScorer]
    documents: dict[str, Document]
    queries: list[tuple[str, str]] | None

    def reference_scores(self, pairs: Sequence[Pair], cut: bool = False) -> np.ndarray:
        """Returns [references, pairs] log-likelihoods under each reference, in nats."""
        return np.stack([score(pairs, cut) for score in self.references])

    def pair(self, canary: canary_set.Canary, secret: str | None = None) -> Pair:
        """Returns a canary, or one of its candidates, as a pair."""
        document = self.documents[canary.document_id]
        return Pair(
            "",
            canary.query(secret),
            document.id,
            canary.document(document.content, secret),
        )

    def set_scores(self, pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
        """Returns the scores under the synthetic set, if there is one."""
        if self.queries is None:
            return {}
        scores = text_scores.set_scores(self.queries, pairs)
        return {f"set_{name}": values for name, values in scores.items()}

    def written(self, made: Iterable[canary_set.Canary]) -> Iterator[str]:
        """Yields queries that the generator writes for canaries' documents.

        For the documents without the secret, which would otherwise only be copied.
        """
        documents = [self.documents[canary.document_id] for canary in made]
        with strategy.here():
            rows = self.model.write_queries(
                documents,
                TopP(0.8),  # the paper's
                seed=self.config.seed,
                samples=self.config.samples_per_document,
                batch_size=self.config.batch_size,
            )
        for row in rows:
            yield row.query


def load(
    config: ml_collections.ConfigDict,
    references: Sequence[str],
    made: Sequence[canary_set.Canary],
) -> Subject:
    """Loads the models, and the documents of the canaries."""
    with strategy.here():
        models = [
            T5QueryGenerator.from_preset(path)
            for path in (config.generator, *references)
        ]
        # References read what the generator reads.
        scorer, *others = (
            text_scores.LikelihoodScorer(
                model, models[0].preprocessor, config.batch_size
            )
            for model in models
        )
    wanted = {canary.document_id for canary in made}
    return Subject(
        config,
        models[0],
        scorer,
        others,
        {d.id: d for d in data_of(config.canaries).documents() if d.id in wanted},
        [
            (row.document_id, row.query)
            for row in read_synthetic(config.synthetic)
            # Written with the secret in view.
            if not row.document_id.startswith(canary_set.ID_PREFIX)
        ]
        if config.synthetic
        else None,
    )


def data_of(canaries: str) -> BeirDirectory:
    """Returns the BEIR directory of the pairs with canaries."""
    return sources.open_beir(str(pathlib.Path(canaries) / canary_set.DATA))


def training_of(generator: str, canaries: str) -> ml_collections.ConfigDict:
    """Returns the config of a generator's training on canaries.

    Raises:
      InputError: it was not trained on them, or there is no record.
    """
    directory = pathlib.Path(generator)
    workdir.stage_fingerprint(directory)
    stage = workdir.read_json(directory / workdir.STAGE_FILE)
    pairs = str(pathlib.Path(canaries) / canary_set.DATA)
    try:
        trained = ml_collections.ConfigDict(stage["config"])
    except ValueError:  # none that a stage has written: a dot in a name
        trained = ml_collections.ConfigDict()
    if "private_directory" not in trained or "query_length" not in trained:
        raise validation.InputError(
            f"{directory} is not a generator that finetune trained. Give one that was "
            f"trained on {pairs}."
        )
    private = releases.private_directory(directory, trained.private_directory)
    key = private / sources.KEY_FILE
    if not key.is_file():
        raise validation.InputError(
            f"{key} is missing, without which the training data of {directory} are not "
            "known. Audit on the machine and path where it was trained."
        )
    if stage["inputs"].get("pairs") != sources.source_fingerprint(pairs, private):
        raise validation.InputError(
            f"{directory} was not trained on {pairs}, but on {trained.pairs}: secrets "
            "must be put in before training. Train a generator on them, then audit it."
        )
    return trained


def require_own_set(synthetic: str, generator: str) -> None:
    """Refuses a path without a set, and a set that another generator wrote."""
    if not sources.is_free(synthetic):
        raise validation.InputError(
            f"synthetic is {synthetic!r}, where there is no set of queries. Give the "
            "directory of a set that synthesize wrote."
        )
    made = read_manifest(synthetic)["provenance"]
    while "of" in made:  # filtered
        made = made["of"]
    if made.get("inputs", {}).get("generator") != workdir.stage_fingerprint(generator):
        raise validation.InputError(
            f"{synthetic} was not written by {generator}, according to its "
            "manifest.json, so the audit would mix two generators. Give the set that "
            "this generator wrote, or no set."
        )


def guarantee_of(generator: str) -> dict[str, Any]:
    """Returns the guarantee of the run that the canaries were put into.

    A generator that continued others states the ε of all runs; the canaries' queries
    were in the last one alone, unless an earlier one was trained on these pairs.

    Raises:
      InputError: the certificate is missing.
    """
    certificate = certificate_of(generator)
    found = dict(certificate["guarantee"])
    pairs = [
        each["fingerprints"].get("pairs")
        for each in (certificate, *parents_of(certificate))
    ]
    own = certificate.get("continuation")
    if own and pairs[0] not in pairs[1:]:
        found["epsilon"] = own["epsilon_of_this_run"]
        found["delta"] = own["delta_of_this_run"]
    return found


def certificate_of(generator: str) -> dict[str, Any]:
    """Returns the certificate of the generator under audit.

    Raises:
      InputError: it is missing.
    """
    certificate = read_certificate(generator)
    if certificate is None:
        raise validation.InputError(
            f"{generator} was trained on private queries, but its certificate.json is "
            "missing. Train it again."
        )
    return certificate


def members_of(
    beir: BeirDirectory, split: str, other_splits: Sequence[str], most: int, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """Draws training queries and held-out ones at random, without canaries.

    Raises:
      InputError: fewer than 2 of each.
    """
    random = np.random.default_rng(seed)
    trained = beir.pairs(split)
    inside = [
        row
        for row, (name, _) in enumerate(trained.ids())
        if not name.startswith(canary_set.ID_PREFIX)
    ]
    tables = [
        beir.pairs(other)
        for other in other_splits
        if other in beir.splits() and other != split
    ]
    outside = [(table, row) for table in tables for row in range(len(table))]
    count = min(most, len(inside), len(outside))
    if count < 2:
        raise validation.InputError(
            f"there are {len(inside)} training queries and {len(outside)} in splits "
            f"{tuple(other_splits)}; a comparison takes 2 of each. Train on more, such "
            "as by a larger most_pairs of the canaries, or name other splits with "
            "queries that were not trained on."
        )
    members = [trained[inside[row]] for row in random.permutation(len(inside))[:count]]
    others = (outside[row] for row in random.permutation(len(outside))[:count])
    return members, [table[row] for table, row in others]
