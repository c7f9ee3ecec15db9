"""Evaluate retrievers on the test queries of a BEIR directory.

python -m tfdpsq.run.evaluate --config=configs/evaluate.py --workdir=OUT \
    --config.data=BEIR_DIR --config.vocabulary=SPIECE_MODEL \
    --config.systems.mine=RETRIEVER_DIR

Embeddings of the corpus that encode or index made with it need not be made again:
--config.indexes.mine=ENCODE_DIR

Shared by four commands, each with an index of its own, on one machine or on several
that see one disk: --num_shards=4 --shard_index=0. By workers of Apache Beam: --beam
--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing
"""

from tfdpsq.run import evaluate


def get_config():
    """BM25, and one retriever called "mine"; add others to `systems`."""
    config = evaluate.default_config()
    with config.unlocked():
        config.systems.mine = ""
        config.indexes.mine = ""
    return config
