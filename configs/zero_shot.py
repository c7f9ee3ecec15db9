"""Evaluate retrievers on public test sets, by default the paper's eleven.

python -m tfdpsq.run.zero_shot --config=configs/zero_shot.py --workdir=OUT \
    --config.root=DIRECTORY_OF_BEIR_SETS --config.vocabulary=SPIECE_MODEL \
    --config.systems.mine=RETRIEVER_DIR

Fewer sets: --config.sets="('scifact','nfcorpus')". A set that lies elsewhere, or one of
your own that is public: an entry in `paths`.
"""

from tfdpsq.run import zero_shot


def get_config():
    """BM25, and one retriever called "mine"; add others to `systems`."""
    config = zero_shot.default_config()
    with config.unlocked():
        config.systems.mine = ""
    return config
