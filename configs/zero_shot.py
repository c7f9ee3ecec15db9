"""Retrievers on public test sets, by default the paper's eleven.

    python -m tfdpsq.run.zero_shot --config=configs/zero_shot.py --workdir=OUT \
        --config.root=BEIR_SETS --config.systems.mine=RETRIEVER

Duration: not run here.
Result: not run here.

Fewer sets: --config.sets="('scifact','nfcorpus')". For a set in another directory, or a
public one of your own, add an entry to `paths`.
"""

from tfdpsq.run import zero_shot


def get_config():
    """Returns BM25 and a retriever called "mine"; add others to `systems`."""
    config = zero_shot.default_config()
    with config.unlocked():
        config.systems.mine = ""
    return config
