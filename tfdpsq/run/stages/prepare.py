"""Prepare public inputs: check the data, learn a vocabulary, cut pseudo-queries.

    tfdpsq prepare --workdir=OUT --config.data=BEIR

Uses the documents only, which are public; checks the queries for errors, but leaves no
trace of them in the output. Writes `vocabulary/spiece.model` and `set/`, sentences cut
from the documents, each paired with the rest of its document: a baseline without any
private data.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from absl import logging

from tfdpsq.data import pseudo_pairs, train_vocabulary
from tfdpsq.data.pseudo_queries import WORDS
from tfdpsq.data.sets import SyntheticQuery
from tfdpsq.data.tokenization import VOCABULARY_FILE
from tfdpsq.run.common import data_card
from tfdpsq.run.common.kinds import Corpus
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.runner import Context, Stage
from tfdpsq.run.frame.settings import Rule, path, setting
from tfdpsq.validation import InputError

VOCABULARY = pathlib.Path("vocabulary", VOCABULARY_FILE)


class Prepare(Stage):
    """Learns a vocabulary, and cuts pairs, from documents."""

    name = "prepare"

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `prepare`."""

        data: str = path(Corpus, "pydocs")
        splits: tuple[str, ...] = setting(("train", "test"), of=Rule())
        strict: bool = setting(False, help="refuse data that are otherwise left out")
        vocabulary_size: int = setting(8192, ge=0, help="0 learns none")
        pseudo_queries_per_document: int = setting(1, ge=1)
        seed: int = setting(0, ge=0, le=settings.SEED)

    def run(self, c: Context) -> dict[str, Any]:
        """Raises DataError at the first bad line; InputError if nothing can be cut."""
        s, beir = c.settings, c.given["data"].beir()
        counts = beir.validate(s.splits, s.strict)
        logging.info("%s: %s", s.data, counts)
        for flaw, count in counts.flaws.items():
            logging.warning("%s: %s (%d times)", s.data, flaw, count)
        c.counts["flaws"] = dict(counts.flaws)
        # Nothing is learned before it is known that there will be pairs.
        if next(pseudo_pairs(beir.documents(), s.seed), None) is None:
            raise InputError(
                f"data is {s.data}: none of its {counts.documents} documents has a "
                f"sentence of {WORDS[0]} to {WORDS[-1]} words to cut a public query "
                "from. Give documents of prose."
            )
        if s.vocabulary_size:
            (c.out / VOCABULARY).parent.mkdir()
            texts = (document.content for document in beir.documents())
            train_vocabulary(texts, s.vocabulary_size, c.out / VOCABULARY)
        each = s.pseudo_queries_per_document
        rows = (
            SyntheticQuery(f"genQ{n}", p.query, p.document_id, p.document, 0)
            for n, p in enumerate(pseudo_pairs(beir.documents(), s.seed, each))
        )
        made_from = "public documents only"
        manifest = data_card.write_set(c, rows, made_from=made_from)
        # Excludes all counts of private queries: this is released.
        return {"documents": counts.documents, "queries": manifest["count"]}


STAGE = Prepare()
