"""Ways to spend ε, chosen on public stand-ins: the trained weights and their rate.

    python -m tfdpsq.run.grid --config=configs/grid.py --workdir=DIR

Duration: 18 points; those that were timed took two to four minutes on two cores.
Result: all weights, the decoder alone (in half the time) and LoRA of rank 32 on every
linear layer are equally good, each at its best rate. The card of `t5_tiny_pydocs`
(tfdpsq/generator/presets) has the points that were run, under "Spending ε on it".
"""

from tfdpsq.run import grid

ATTENTION = ("*attention/query_projector", "*attention/value_projector")


def get_config():
    """Returns six choices of weights by three rates, each at ε = 8 on the proxy."""
    config = grid.default_config()
    stage = config.finetune
    stage.init = "t5_tiny_pydocs"
    stage.epsilon = 8.0
    stage.n_is_public = True
    stage.accountant = "rdp"
    stage.document_length, stage.query_length = 96, 24
    stage.batch_size, stage.microbatch_size, stage.steps = 512, 64, 40
    stage.clip_norm = 0.1
    config.variants = {
        "all": {},
        "lora8": {"lora": {"rank": 8, "alpha": 8.0, "targets": ATTENTION}},
        "lora32": {"lora": {"rank": 32, "alpha": 32.0, "targets": ("*projector",)}},
        "norms": {"trained": ("*layer_norm*", "*self_attention/embeddings")},
        "decoder": {"trained": ("*decoder*",)},
        "prompt": {"soft_prompt": {"length": 8}},
    }
    config.axes = (("learning_rate", (1e-3, 2e-3, 4e-3)),)
    return config
