"""Embed a corpus with a retriever, and export both as one SavedModel.

python -m tfdpsq.run.index --config=configs/index.py --workdir=OUT \
    --config.retriever=RETRIEVER --config.vocabulary=SPIECE_MODEL --config.corpus=BEIR
"""

from tfdpsq.run import index


def get_config():
    """An exact index; kind "scann" for millions of documents."""
    return index.default_config()
