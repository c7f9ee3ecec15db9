"""Document to query: the T5 generator, what it reads, and what it writes."""

import tfdpsq.stack  # noqa: F401  checks the environment first
from tfdpsq.generator.likelihood import QueryLikelihood, Reranker
from tfdpsq.generator.model import QueryLoss, T5QueryGenerator
from tfdpsq.generator.preprocessing import Preprocessor
from tfdpsq.generator.samplers import Greedy, TopK, TopP

__all__ = [
    "Greedy",
    "Preprocessor",
    "QueryLikelihood",
    "QueryLoss",
    "Reranker",
    "T5QueryGenerator",
    "TopK",
    "TopP",
]
