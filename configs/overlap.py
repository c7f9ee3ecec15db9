"""How much of the data stands in a corpus that a model was pretrained on.

python -m tfdpsq.run.overlap --config=configs/overlap.py \
    --workdir=WORKDIR/private/overlap --config.data=BEIR --config.corpus=TEXTS

TEXTS: a file, directory or pattern of text, JSON lines or TFRecords, or tfds:c4/en.

Shared by four commands, each with an index of its own, on one machine or on several
that see one disk: --num_shards=4 --shard_index=0. By workers of Apache Beam: --beam
--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing
"""

from tfdpsq.run import overlap


def get_config():
    """Three draws of 10,000 queries and documents, as in the paper's §5.2.3."""
    return overlap.default_config()
