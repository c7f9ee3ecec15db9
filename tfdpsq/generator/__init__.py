"""Document to query: the T5 generator, its training arrays, decoding, synthesis."""

from tfdpsq.generator.decoding import CachedDecoder, decodable_logits_mask, generate
from tfdpsq.generator.examples import encode_pairs
from tfdpsq.generator.model import T5QueryGenerator
from tfdpsq.generator.sampling import SamplingConfig, sample
from tfdpsq.generator.synthesis import (
    SynthesisConfig,
    Synthesizer,
    row_uniforms,
    synthesize,
)

__all__ = [
    "CachedDecoder",
    "SamplingConfig",
    "SynthesisConfig",
    "Synthesizer",
    "T5QueryGenerator",
    "decodable_logits_mask",
    "encode_pairs",
    "generate",
    "row_uniforms",
    "sample",
    "synthesize",
]
