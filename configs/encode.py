"""Embed a corpus with a retriever, in shards that several processes can share.

python -m tfdpsq.run.encode --config=configs/encode.py --workdir=OUT \
    --config.retriever=RETRIEVER --config.vocabulary=SPIECE_MODEL --config.corpus=BEIR

The queries of a synthetic set, or of a split: --config.texts=queries
--config.corpus=SET, or --config.corpus=BEIR --config.split=test. A BEIR directory's are
private, and go to --workdir=DIR/private/OUT, unless --config.private=False.

Shared by four commands, each with an index of its own, on one machine or on several
that see one disk: --num_shards=4 --shard_index=0. By workers of Apache Beam: --beam
--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing
"""

from tfdpsq.run import encode


def get_config():
    """All of the corpus, in shards of 65,536 documents."""
    return encode.default_config()
