"""Data on disk: pairs, the embedded corpus, synthetic sets, tokens."""

import tfdpsq.stack  # noqa: F401  checks the environment first

# isort: split
from typing import TYPE_CHECKING

from tfdpsq import lazy

if TYPE_CHECKING:
    from tfdpsq.data.beir import BeirDirectory, Counts, write_beir
    from tfdpsq.data.pseudo_queries import pseudo_pairs
    from tfdpsq.data.pydocs import build_pydocs, load
    from tfdpsq.data.rows import RowStore, write_rows
    from tfdpsq.data.sets import (
        SyntheticQuery,
        decode_query,
        encode_query,
        read_manifest,
        read_synthetic,
        verify,
        write_synthetic,
    )
    from tfdpsq.data.texts import Document, Pair
    from tfdpsq.data.tokenization import PROMPT, Tokenizer, train_vocabulary
else:
    __getattr__, __dir__ = lazy.package(__name__)

__all__ = [
    "PROMPT",
    "BeirDirectory",
    "Counts",
    "Document",
    "Pair",
    "RowStore",
    "SyntheticQuery",
    "Tokenizer",
    "build_pydocs",
    "decode_query",
    "encode_query",
    "load",
    "pseudo_pairs",
    "read_manifest",
    "read_synthetic",
    "train_vocabulary",
    "verify",
    "write_beir",
    "write_rows",
    "write_synthetic",
]
