"""Direct training of a retriever on private pairs, chosen on public stand-ins.

    python -m tfdpsq.run.grid --config=configs/grid_retriever.py --workdir=DIR

Duration: not stated. Half of the 12 points were run, and others near them, by hand.
Result: `CHOSEN`; figures with it are in tests/benchmarks/README.md, under "Direct
training against synthetic queries".

`get_config` has the points for `public_negatives`; `settings` the choice for each
method. "projection" is `public_negatives` with the query projection alone and many rows
in each step, after four trials on the dev queries of pydocs.
"""

from tfdpsq.run import grid, train_retriever

# The query tower without its embeddings; the documents' tower is frozen.
QUERY_LAYERS = ("query_tower/*transformer*", "query_tower/projection/kernel")

# Settings that differ between methods.
CHOSEN = {
    # Few rows: sensitivity, and so the noise, grows with the batch.
    "naive": {"batch_size": 4, "learning_rate": 2e-4},
    "logit_dp": {"batch_size": 4, "learning_rate": 2e-4},
    "microbatch": {
        "shared": False,
        "trained": QUERY_LAYERS,
        "batch_size": 1024,
        "clip_groups": 128,
        "learning_rate": 5e-4,
    },
    "public_negatives": {
        "shared": False,
        "trained": QUERY_LAYERS,
        "batch_size": 1024,
        "microbatch_size": 128,
        "negatives": 4096,
        "learning_rate": 1e-3,
    },
    "projection": {
        "method": "public_negatives",
        "shared": False,
        "trained": ("query_tower/projection/kernel",),
        "batch_size": 6144,
        "microbatch_size": 512,
        "negatives": 8192,
        "learning_rate": 2e-3,
    },
}


def settings(name):
    """Returns the config of `train_retriever` for a choice, at ε = 8 and 50 steps."""
    config = train_retriever.default_config()
    config.init = "t5_tiny_pydocs"
    config.epsilon = 8.0
    config.n_is_public = True
    config.document_length, config.query_length = 96, 24
    config.embedding_dim, config.scale = 192, 20.0
    config.steps = 50
    config.schedule = "cosine"
    config.update({"method": name, **CHOSEN[name]})
    return config


def get_config():
    """Returns four choices of weights by three rates, each at ε = 8."""
    config = grid.default_config()
    config.stage = "train_retriever"
    config.train_retriever = settings("public_negatives")
    both = {"shared": True, "trained": ("*",), "batch_size": 256, "negatives": 256}
    config.variants = {
        "both towers": both,
        "query tower": {"trained": ("query_tower/*",)},
        "query layers": {},
        "query projection": {"trained": ("query_tower/projection/kernel",)},
    }
    config.axes = (("learning_rate", (5e-4, 1e-3, 2e-3)),)
    return config
