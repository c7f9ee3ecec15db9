"""Embed a corpus with a retriever, in shards that several processes can share.

python -m tfdpsq.run.encode --config=configs/encode.py --workdir=OUT \
    --config.retriever=RETRIEVER --config.vocabulary=SPIECE_MODEL --config.corpus=BEIR
"""

from tfdpsq.run import encode


def get_config():
    """All of the corpus, in shards of 65,536 documents."""
    return encode.default_config()
