"""Document to query: the T5 generator, its training arrays, decoding, synthesis."""

import tfdpsq.stack  # noqa: F401  checks the environment first
from tfdpsq.generator.examples import encode_pairs
from tfdpsq.generator.likelihood import QueryLikelihood
from tfdpsq.generator.model import T5QueryGenerator
from tfdpsq.generator.sampling import SamplingConfig
from tfdpsq.generator.serving import RerankedSearch
from tfdpsq.generator.synthesis import SynthesisConfig, Synthesizer, synthesize

__all__ = [
    "QueryLikelihood",
    "RerankedSearch",
    "SamplingConfig",
    "SynthesisConfig",
    "Synthesizer",
    "T5QueryGenerator",
    "encode_pairs",
    "synthesize",
]
