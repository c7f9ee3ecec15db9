"""Retrievers on the test queries of a BEIR directory, or on public test sets.

    tfdpsq evaluate --config=configs/evaluate.py --workdir=JOB/private/evaluation \
        --config.data=BEIR --config.systems.mine=RETRIEVER

Duration: not stated.
Result: `metrics.json`; figures of several jobs are in tests/benchmarks/README.md.

Zero-shot, on public sets by BEIR's names, with the paper's rules:
--config=configs/evaluate.py:sets --config.sets.scifact=BEIR_SETS/scifact. By workers
of Apache Beam: --beam --runner=DirectRunner --direct_num_workers=2
--direct_running_mode=multi_processing
"""

from tfdpsq.run.common.search import BM25
from tfdpsq.run.stages import evaluate


def get_config(on="data"):
    """Returns BM25 and a retriever called "mine"; add others to `systems`."""
    config = evaluate.STAGE.config(baseline=BM25)
    with config.unlocked():
        config.systems.mine = ""
        if on == "sets":
            config.sets.scifact = ""
    return config
