"""Query ↔ document: the two-tower model, its batches, its losses, its index."""

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
from tfdpsq.retriever.encoding import encode_texts
from tfdpsq.retriever.index import ScannBruteForce, as_run, search
from tfdpsq.retriever.losses import in_batch_losses, losses_among
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
    encode_documents,
    encode_pairs,
    make_batches,
)

__all__ = [
    "METHODS",
    "GroupLosses",
    "LogitTerms",
    "NaiveLosses",
    "PublicNegatives",
    "RetrieverConfig",
    "ScannBruteForce",
    "TwoTower",
    "as_run",
    "collate",
    "content_key",
    "encode_documents",
    "encode_pairs",
    "encode_texts",
    "in_batch_losses",
    "load",
    "logit_dp_is_vacuous_above",
    "logit_dp_sensitivity_multiplier",
    "losses_among",
    "make_batches",
    "microbatch_sensitivity_multiplier",
    "naive_sensitivity_multiplier",
    "public_negatives_sensitivity_multiplier",
    "save",
    "search",
    "start_from",
]
