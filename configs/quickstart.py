"""The main job at a size for two cores: every row of the table, end to end.

    python -m tfdpsq.run.pipeline --config=configs/quickstart.py \
        --workdir=/tmp/tfdpsq-quickstart

Data: the embedded pydocs corpus (docstrings; summaries are the private queries).
Another BEIR directory: add --config.data=DIRECTORY.
"""

import math

from tfdpsq.run import pipeline


def get_config():
    """The settings; what is not set here keeps each stage's default."""
    config = pipeline.default_config()
    config.data = "pydocs"
    config.epsilons = (math.inf, 8.0)
    config.direct_epsilons = (8.0,)

    vocabulary_size = 4096
    # How many docstrings or questions there are is no secret; of your own data,
    # declare it, or set n_bound to a public upper bound instead.
    for stage in (config.pretrain, config.finetune, config.retriever, config.direct):
        stage.n_is_public = True

    lengths = {"document_length": 96, "query_length": 24}
    t5 = {
        "vocabulary_size": vocabulary_size,
        "num_heads": 4,
        "version": "1.1",
        "dropout": 0.0,
    }
    config.prepare.vocabulary_size = vocabulary_size

    generator = {
        "num_layers": 2,
        "hidden_dim": 128,
        "intermediate_dim": 256,
        "key_value_dim": 32,
    }
    for stage in (config.pretrain, config.finetune):
        stage.t5.update({**t5, **generator})
        stage.update(lengths)

    # Public warm start: sentences cut from the documents themselves.
    config.pretrain.batch_size = 64
    config.pretrain.microbatch_size = 16
    config.pretrain.steps = 600
    config.pretrain.learning_rate = 2e-3

    config.finetune.batch_size = 64
    config.finetune.microbatch_size = 16
    config.finetune.steps = 100
    config.finetune.learning_rate = 5e-4
    config.finetune.clip_norm = 0.1

    config.synthesize.update(lengths)
    config.synthesize.max_documents = 9600
    config.synthesize.query_length = 20

    encoder = {
        "num_layers": 1,
        "hidden_dim": 192,
        "intermediate_dim": 384,
        "key_value_dim": 48,
    }
    for stage in (config.retriever, config.direct):
        stage.t5.update({**t5, **encoder})
        stage.update(lengths)
        stage.embedding_dim = 192
        stage.scale = 20.0
        stage.batch_size = 24
        stage.steps = 300
        stage.learning_rate = 1e-3
        stage.engine = "dpkeras"
    return config
