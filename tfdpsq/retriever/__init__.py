"""Query ↔ document: the two-tower model, its batches, its losses, its index."""

from tfdpsq.retriever.caching import cached_gradients
from tfdpsq.retriever.direct_dp import (
    METHODS,
    logit_dp_is_vacuous_above,
    logit_dp_sensitivity_multiplier,
    microbatch_sensitivity_multiplier,
    naive_sensitivity_multiplier,
    public_negatives_sensitivity_multiplier,
)
from tfdpsq.retriever.direct_losses import (
    GroupLosses,
    LogitTerms,
    NaiveLosses,
    PublicNegatives,
)
from tfdpsq.retriever.encoding import (
    Embedder,
    encode_texts,
    progress_bar,
    with_vectors,
)
from tfdpsq.retriever.index import ScannBruteForce, ScannTree, as_run, search
from tfdpsq.retriever.losses import (
    Embeddings,
    batch_losses,
    in_batch_losses,
    losses_among,
)
from tfdpsq.retriever.model import (
    RetrieverConfig,
    TwoTower,
    go_on_from,
    load,
    save,
    start_from,
)
from tfdpsq.retriever.nearest import BestDocuments, KBest
from tfdpsq.retriever.serving import SearchModel
from tfdpsq.retriever.store import DocumentIndex, encoder_fingerprint
from tfdpsq.retriever.stored_pairs import StoredPairs, store_pairs
from tfdpsq.retriever.training import (
    collate,
    content_key,
    encode_documents,
    encode_negatives,
    encode_pairs,
    make_batches,
    require_enough,
)

__all__ = [
    "METHODS",
    "BestDocuments",
    "DocumentIndex",
    "Embedder",
    "Embeddings",
    "GroupLosses",
    "KBest",
    "LogitTerms",
    "NaiveLosses",
    "PublicNegatives",
    "RetrieverConfig",
    "ScannBruteForce",
    "ScannTree",
    "SearchModel",
    "StoredPairs",
    "TwoTower",
    "as_run",
    "batch_losses",
    "cached_gradients",
    "collate",
    "content_key",
    "encode_documents",
    "encode_negatives",
    "encode_pairs",
    "encode_texts",
    "encoder_fingerprint",
    "go_on_from",
    "in_batch_losses",
    "load",
    "logit_dp_is_vacuous_above",
    "logit_dp_sensitivity_multiplier",
    "losses_among",
    "make_batches",
    "microbatch_sensitivity_multiplier",
    "naive_sensitivity_multiplier",
    "progress_bar",
    "public_negatives_sensitivity_multiplier",
    "require_enough",
    "save",
    "search",
    "start_from",
    "store_pairs",
    "with_vectors",
]
