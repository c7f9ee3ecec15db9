"""Retrievers on the test queries of a BEIR directory.

    python -m tfdpsq.run.evaluate --config=configs/evaluate.py --workdir=OUT \
        --config.data=BEIR --config.systems.mine=RETRIEVER

Duration: not stated.
Result: `metrics.json`; figures of several jobs are in tests/benchmarks/README.md.

To use embeddings that `encode` or `index` made of the corpus: --config.indexes.mine=DIR
Four commands share the work, each with its own index, on one machine or on several with
a common disk: --num_shards=4 --shard_index=0. By workers of Apache Beam: --beam
--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing
"""

from tfdpsq.run import evaluate


def get_config():
    """Returns BM25 and a retriever called "mine"; add others to `systems`."""
    config = evaluate.default_config()
    with config.unlocked():
        config.systems.mine = ""
        config.indexes.mine = ""
    return config
