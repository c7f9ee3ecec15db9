"""Write synthetic queries with a trained generator: nucleus sampling at p = 0.8.

python -m tfdpsq.run.synthesize --config=configs/synthesize.py --workdir=OUT \
    --config.generator=GENERATOR_DIR --config.vocabulary=SPIECE_MODEL \
    --config.corpus=BEIR_DIR

Shared by four commands, each with an index of its own, on one machine or on several
that see one disk: --num_shards=4 --shard_index=0. By two workers of Apache Beam:
--beam --runner=DirectRunner --direct_num_workers=2 \
    --direct_running_mode=multi_processing
"""

from tfdpsq.run import synthesize


def get_config():
    """The paper's values: one query a document, p = 0.8."""
    return synthesize.default_config()
