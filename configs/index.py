"""Embed a corpus with a retriever, and export both as one SavedModel.

python -m tfdpsq.run.index --config=configs/index.py --workdir=OUT \
    --config.retriever=RETRIEVER --config.vocabulary=SPIECE_MODEL --config.corpus=BEIR

Shared by four commands, each with an index of its own, on one machine or on several
that see one disk: --num_shards=4 --shard_index=0. By workers of Apache Beam: --beam
--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing
"""

from tfdpsq.run import index


def get_config():
    """An exact index; kind "scann" for millions of documents."""
    return index.default_config()
