"""Query ↔ document: the two-tower model, its batches, its losses, its index."""

import tfdpsq.stack  # noqa: F401  checks the environment first
from tfdpsq.retriever.caching import cached_gradients
from tfdpsq.retriever.direct_dp import (
    METHODS,
    microbatch_sensitivity_multiplier,
    naive_sensitivity_multiplier,
    public_negatives_sensitivity_multiplier,
)
from tfdpsq.retriever.direct_losses import (
    GroupLosses,
    NaiveLosses,
    PublicNegatives,
)
from tfdpsq.retriever.encoding import (
    Embedder,
    encode_texts,
    with_vectors,
)
from tfdpsq.retriever.index import ScannBruteForce, ScannTree, as_run, search
from tfdpsq.retriever.losses import in_batch_losses
from tfdpsq.retriever.model import (
    RetrieverConfig,
    TwoTower,
    load,
    save,
)
from tfdpsq.retriever.serving import SearchModel
from tfdpsq.retriever.store import DocumentIndex
from tfdpsq.retriever.stored_pairs import StoredPairs, store_pairs
from tfdpsq.retriever.training import (
    collate,
    encode_documents,
    encode_negatives,
    encode_pairs,
    make_batches,
)

__all__ = [
    "METHODS",
    "DocumentIndex",
    "Embedder",
    "GroupLosses",
    "NaiveLosses",
    "PublicNegatives",
    "RetrieverConfig",
    "ScannBruteForce",
    "ScannTree",
    "SearchModel",
    "StoredPairs",
    "TwoTower",
    "as_run",
    "cached_gradients",
    "collate",
    "encode_documents",
    "encode_negatives",
    "encode_pairs",
    "encode_texts",
    "in_batch_losses",
    "load",
    "make_batches",
    "microbatch_sensitivity_multiplier",
    "naive_sensitivity_multiplier",
    "public_negatives_sensitivity_multiplier",
    "save",
    "search",
    "store_pairs",
    "with_vectors",
]
