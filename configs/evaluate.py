"""Evaluate retrievers on the test queries of a BEIR directory.

python -m tfdpsq.run.evaluate --config=configs/evaluate.py --workdir=OUT \
    --config.data=BEIR_DIR --config.vocabulary=SPIECE_MODEL \
    --config.systems.mine=RETRIEVER_DIR
"""

from tfdpsq.run import evaluate


def get_config():
    """BM25, and one retriever called "mine"; add others to `systems`."""
    config = evaluate.default_config()
    with config.unlocked():
        config.systems.mine = ""
    return config
