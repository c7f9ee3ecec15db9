"""Documents that look like answers, for `train_retriever`'s hard_negatives.run.

python -m tfdpsq.run.mine --config=configs/mine.py --workdir=WORKDIR/private/mined \
    --config.pairs=BEIR
"""

from tfdpsq.run import mine


def get_config():
    """BM25's 50 best documents of each query."""
    return mine.default_config()
