r"""Write synthetic queries for public documents with a generator.

    tfdpsq synthesize --workdir=OUT --config.generator=GENERATOR --config.corpus=BEIR

Reads the generator and the corpus's documents, never a private query: the set has the
generator's guarantee and carries its certificate, for any number of queries. With
`documents = "train"` it also reads which documents have private queries; see the
setting. With `histogram` a document has as many queries as those like it have in the
private log, and the certificate is for both. Writes TFRecords and a BEIR directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tqdm

from tfdpsq.data import SyntheticQuery, decode_query, encode_query
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.generator.samplers import LEAST_TEMPERATURE, sampler_of
from tfdpsq.run.common import corpus, data_card, documents
from tfdpsq.run.common.kinds import Corpus, Generator
from tfdpsq.run.frame import records, runner, settings, shards
from tfdpsq.run.frame.artefacts import Artefact
from tfdpsq.run.frame.runner import Context, Given
from tfdpsq.run.frame.settings import path, setting
from tfdpsq.validation import InputError

_EXTENSION = "tfrecord"


class Synthesize(runner.ShardedStage):
    """Writes queries for public documents; post-processing costs no ε."""

    name = "synthesize"
    strategies = ("default", "mirrored", "tpu")

    @dataclasses.dataclass(frozen=True)
    class Settings(settings.Settings):
        """Settings of `synthesize`."""

        generator: str = path(Generator)
        corpus: str = path(Corpus, "pydocs")
        documents: str = setting(
            "corpus",
            choices=("corpus", "train"),
            help="train: those of the pairs of split alone, as in the paper; which are "
            "theirs is a private read, so they must be declared public",
        )
        split: str = setting("train", when={"documents": ("train",)})
        training_documents_are_public: bool = setting(
            False, when={"documents": ("train",)}
        )
        histogram: str = path(
            Artefact,
            "",
            when={"documents": ("corpus",)},
            help="as many queries as without, for documents like those asked for; the "
            "generator must have been trained after it",
        )
        max_documents: int = setting(
            0, ge=0, when={"documents": ("corpus",)}, help="evenly spread; 0 takes all"
        )
        samples_per_document: int = setting(1, ge=1)
        max_length: int = setting(0, ge=0, help="tokens; 0 is the generator's")
        temperature: float = setting(1.0, ge=LEAST_TEMPERATURE, zero=True)
        top_k: int = setting(0, ge=0, when="temperature")
        top_p: float = setting(0.8, gt=0, le=1, when="temperature")
        dtype: str = setting("float32", choices=("float32", "mixed_bfloat16"))
        seed: int = setting(0, ge=0, le=settings.SEED)
        jit_compile: bool = setting(False)
        shards: int = setting(4, ge=1, le=99_999, help="files of the set")
        batch_size: int = setting(64, ge=1, speed=True)
        shard_documents: int = setting(
            8192, ge=1, speed=True, help="the most that a kill can lose"
        )

    def check(self, s: Settings, given: Given) -> None:
        """Refuses training documents that were not declared to be public."""
        if s.documents == "train" and not s.training_documents_are_public:
            raise InputError(
                "documents is 'train', so that the set shows which documents have "
                "private queries, which no epsilon covers. Set "
                "training_documents_are_public to True if that is public anyway."
            )

    def also(self, c: Context) -> dict[str, str]:
        """The choice of documents is an input, too."""
        if c.settings.documents == "corpus":
            return {}
        return {"training_documents": records.digest(sorted(self._only(c) or ()))}

    def parts(self, c: Context) -> corpus.Parts:
        """Cuts the corpus."""
        s, only = c.settings, self._only(c)
        most = 0 if s.histogram else s.max_documents
        scanned = corpus.scan(c.given["corpus"].beir().corpus_file)
        return scanned.cut(s.shard_documents, most, only)

    def start(self, c: Context) -> shards.Make:
        """Loads the generator."""
        s, parts, rates = c.settings, c.parts, self._rates(c)
        with c.scope():
            model = T5QueryGenerator.from_preset(c.given["generator"].path, s.dtype)
        each = s.samples_per_document if rates is None else rates.queries / parts.taken

        def make(index: int, out: shards.ShardWriter) -> None:
            read, first = parts.read(index), parts.first(index)
            total = None if parts.only else round(parts.size(index) * each)
            bar = tqdm.tqdm(total=total, desc=f"shard {index}", unit=" queries")
            with bar, tf.io.TFRecordWriter(out.path(_EXTENSION)) as file:
                with c.scope():
                    rows = model.write_queries(
                        read if rates is None else rates.of(read),
                        first=first,
                        sampler=sampler_of(s.temperature, s.top_k, s.top_p),
                        max_length=s.max_length or None,
                        seed=s.seed,
                        samples=s.samples_per_document,
                        batch_size=s.batch_size,
                        jit_compile=s.jit_compile,
                        on_batch=lambda queries, tokens: bar.update(queries),
                    )
                for row in rows:
                    file.write(encode_query(row))
                    out.count += 1

        return make

    def merge(self, c: Context, made: shards.Shards) -> dict[str, Any]:
        """Writes the queries of all shards as one set, with its data card."""
        reads = []
        if c.settings.documents == "train":
            what = "which documents have private training queries, declared public"
            reads.append({"what": what, "where": "the documents of the set"})
        manifest = data_card.write_set(
            c, _rows(made), c.settings.shards, private_reads=reads
        )
        left_out = manifest["empty_queries_left_out"]
        return {"queries": manifest["count"], "empty_queries_left_out": left_out}

    def _only(self, c: Context) -> frozenset[str] | None:
        """Returns the ids of the documents to write for; `None` for all."""
        if c.settings.documents == "corpus":
            return None
        judged = c.given["corpus"].beir().positives(c.settings.split)
        return frozenset(row.document_id for row in judged)

    def _rates(self, c: Context) -> documents.Rates | None:
        """Returns how many queries a document gets by the histogram."""
        given, s = c.given.get("histogram"), c.settings
        if given is None:
            return None
        histogram = documents.Histogram.load(given.path)
        if histogram.corpus != c.inputs["corpus"]:
            raise InputError(
                f"histogram is {s.histogram}, which was made of another corpus than "
                f"{s.corpus}. Give the corpus of its pairs."
            )
        taken = min(s.max_documents or c.parts.total, c.parts.total)
        return histogram.rates(taken * s.samples_per_document, s.seed)


def _rows(made: shards.Shards) -> Iterator[SyntheticQuery]:
    """Yields the queries of all shards in order, numbered."""
    files = tf.data.TFRecordDataset(made.paths(_EXTENSION))
    for number, data in enumerate(files.as_numpy_iterator()):
        yield dataclasses.replace(decode_query(data), query_id=f"genQ{number}")


STAGE = Synthesize()
