"""Stage `index`: embed a corpus with a retriever, to be searched.

    python -m tfdpsq.run.index --config=configs/index.py --workdir=DIR

Writes `documents/`, embeddings in shards that are searched off the disk (see
`retriever.DocumentIndex`), and, unless `kind` is "streamed", `search/`: encoder and
index as one SavedModel, text in, ids and scores out (`retriever.SearchModel`).
`--config.base=INDEX` takes over all documents of another index of the same retriever
and embeds those whose ids it lacks: documents that were changed or taken away since are
not noticed.

Documents are public, so the index costs no privacy; but what private queries made of
the retriever shows in it. It carries the retriever's certificate.
"""

from __future__ import annotations

import itertools
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import ml_collections

from tfdpsq import retriever, validation
from tfdpsq.data import Document, Tokenizer
from tfdpsq.privacy import read_certificate
from tfdpsq.retriever import serving
from tfdpsq.run import command, private_training, sources, train_retriever, workdir

DOCUMENTS = "documents"
SEARCH = "search"
STREAMED = "streamed"


def default_config() -> ml_collections.ConfigDict:
    """The stage's settings."""
    return ml_collections.ConfigDict(
        {
            "retriever": "",
            "vocabulary": "",
            "corpus": sources.PYDOCS,
            # An index of the same retriever to add to, or "".
            "base": "",
            # "exact", "scann_brute_force", "scann" (approximate), or "streamed": off
            # the disk, for corpora larger than memory.
            "kind": "exact",
            "batch_size": 128,
            # Documents in memory at a time, and in a shard.
            "shard_documents": 65_536,
            "jit_compile": False,
        }
    )


def run(config: ml_collections.ConfigDict, directory: pathlib.Path) -> dict:
    """Runs the stage into `directory` unless it is finished there.

    Raises:
      InputError: bad settings; a base made by another retriever.
      DataError: malformed data, or a damaged base.
    """
    validation.one_of("kind", config.kind, (*serving.KINDS, STREAMED))
    validation.positive_integer("shard_documents", config.shard_documents)
    if not config.retriever or not config.vocabulary:
        raise validation.InputError(
            f"retriever is {config.retriever!r} and vocabulary {config.vocabulary!r}. "
            "Give what train_retriever wrote, and the SentencePiece file it used."
        )
    tokenizer = Tokenizer(config.vocabulary)
    inputs = {
        "retriever": workdir.stage_fingerprint(config.retriever),
        "corpus": sources.corpus_fingerprint(config.corpus),
        "vocabulary": tokenizer.fingerprint,
    }
    used = workdir.read_json(pathlib.Path(config.retriever) / workdir.STAGE_FILE)
    if used["inputs"]["vocabulary"] != tokenizer.fingerprint:
        raise validation.InputError(
            f"vocabulary is {config.vocabulary}, which is not what {config.retriever} "
            "was trained with. Give the SentencePiece file that it was."
        )
    if config.base:
        inputs["base"] = workdir.stage_fingerprint(config.base)
    return workdir.run_stage(
        directory, config, inputs, lambda out: _make(config, out, tokenizer)
    )


def _make(config, out: pathlib.Path, tokenizer: Tokenizer) -> dict[str, Any]:
    model = retriever.load(pathlib.Path(config.retriever) / train_retriever.MODEL)
    tokenizer.require_embeddings(model.config.t5.vocabulary_size)
    fingerprint = retriever.encoder_fingerprint(model, tokenizer.fingerprint)
    if config.base:
        base = pathlib.Path(config.base) / DOCUMENTS
        retriever.DocumentIndex(base, fingerprint).verify()
        shutil.copytree(base, out / DOCUMENTS)
        index = retriever.DocumentIndex(out / DOCUMENTS, fingerprint)
    else:
        index = retriever.DocumentIndex.create(
            out / DOCUMENTS, fingerprint, model.config.embedding_dim
        )
    taken_over = index.size
    new = _new_documents(config.corpus, index)
    while documents := list(itertools.islice(new, config.shard_documents)):
        vectors = retriever.encode_texts(
            model,
            (document.content for document in documents),
            tokenizer,
            "document",
            config.batch_size,
            jit_compile=config.jit_compile,
        )
        index.add([document.id for document in documents], vectors)
    if config.kind != STREAMED:
        retriever.SearchModel(
            model, tokenizer, list(index.ids()), index.embeddings(), config.kind
        ).export(out / SEARCH)
    private_training.write_certificate(out, read_certificate(config.retriever))
    return {"documents": index.size, "taken_over": taken_over}


def _new_documents(corpus: str, index: retriever.DocumentIndex) -> Iterator[Document]:
    documents = sources.open_beir(corpus).documents()
    if not index.size:
        return iter(documents)
    known = set(index.ids())
    return (document for document in documents if document.id not in known)


if __name__ == "__main__":
    command.main(run)
