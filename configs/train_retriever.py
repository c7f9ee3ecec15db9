"""Train a two-tower retriever on a synthetic set, or on private pairs.

python -m tfdpsq.run.train_retriever --config=configs/train_retriever.py \
    --workdir=OUT --config.pairs=SYNTHETIC_SET --config.vocabulary=SPIECE_MODEL
"""

from tfdpsq.run import train_retriever


def get_config():
    """The paper's values: a shared T5-base encoder, batch 32, learning rate 0.001."""
    return train_retriever.default_config()
