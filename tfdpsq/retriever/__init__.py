"""Query ↔ document: the two-tower model, its batches, its losses, its index."""

import tfdpsq.stack  # noqa: F401  checks the environment first
from tfdpsq.retriever.caching import cached_gradients
from tfdpsq.retriever.direct_dp import (
    METHODS,
    GroupLosses,
    NaiveLosses,
    PublicNegatives,
    microbatch_sensitivity_multiplier,
    naive_sensitivity_multiplier,
    public_negatives_sensitivity_multiplier,
)
from tfdpsq.retriever.encoding import Embedder, encode_texts, frozen_rows
from tfdpsq.retriever.hit_rate import HitRate
from tfdpsq.retriever.index import ScannBruteForce, as_run
from tfdpsq.retriever.model import RetrieverConfig, TwoTower, load, save
from tfdpsq.retriever.pairs import (
    StoredPairs,
    encode_documents,
    encode_negatives,
    encode_pairs,
    shuffled_batches,
    store_pairs,
)
from tfdpsq.retriever.serving import SearchModel
from tfdpsq.retriever.store import VectorStore

__all__ = [
    "METHODS",
    "Embedder",
    "GroupLosses",
    "HitRate",
    "NaiveLosses",
    "PublicNegatives",
    "RetrieverConfig",
    "ScannBruteForce",
    "SearchModel",
    "StoredPairs",
    "TwoTower",
    "VectorStore",
    "as_run",
    "cached_gradients",
    "encode_documents",
    "encode_negatives",
    "encode_pairs",
    "encode_texts",
    "frozen_rows",
    "load",
    "microbatch_sensitivity_multiplier",
    "naive_sensitivity_multiplier",
    "public_negatives_sensitivity_multiplier",
    "save",
    "shuffled_batches",
    "store_pairs",
]
