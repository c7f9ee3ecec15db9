"""Query ↔ document: the two-tower model, its batches, its losses, its index."""

from tfdpsq.retriever.direct_dp import naive_sensitivity_multiplier
from tfdpsq.retriever.encoding import encode_texts
from tfdpsq.retriever.index import ScannBruteForce, as_run, search
from tfdpsq.retriever.losses import in_batch_losses
from tfdpsq.retriever.model import (
    RetrieverConfig,
    TwoTower,
    load,
    save,
    start_from,
)
from tfdpsq.retriever.training import (
    collate,
    content_key,
    encode_pairs,
    make_batches,
)

__all__ = [
    "RetrieverConfig",
    "ScannBruteForce",
    "TwoTower",
    "as_run",
    "collate",
    "content_key",
    "encode_pairs",
    "encode_texts",
    "in_batch_losses",
    "load",
    "make_batches",
    "naive_sensitivity_multiplier",
    "save",
    "search",
    "start_from",
]
