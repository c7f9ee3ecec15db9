"""How to train on private pairs directly, chosen on public stand-ins.

    python -m tfdpsq.run.grid --config=configs/grid_retriever.py --workdir=DIR

`public_negatives`: which weights, how fast, how many rows and negatives.
"""

from tfdpsq.run import grid


def get_config():
    """Every point spends ε = 8 on the proxy."""
    config = grid.default_config()
    config.stage = "train_retriever"
    stage = config.train_retriever
    stage.init = "t5_tiny_pydocs"
    stage.method = "public_negatives"
    stage.epsilon = 8.0
    stage.n_is_public = True
    stage.document_length, stage.query_length = 96, 24
    stage.embedding_dim, stage.scale = 192, 20.0
    stage.batch_size, stage.steps = 256, 50
    stage.negatives = 256
    stage.microbatch_size = 64
    stage.schedule = "cosine"
    config.variants = {"all": {}}
    config.axes = (("learning_rate", (1e-4, 5e-4, 2e-3)),)
    return config
