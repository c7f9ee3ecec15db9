"""A generator chosen by held-out private queries.

    python -m tfdpsq.run.choose --config=configs/choose.py --workdir=DIR/generator

Duration: not run here.
Result: not run here.

Four points on pydocs, whose private queries only play that part; ε = 8 covers the four
trainings and the choice together. To take the highest BLEU instead, and declare it, add
--config.choice=declared --config.finetune.strict=False.
"""

from tfdpsq.run import choose


def get_config():
    """Returns two learning rates by two clip norms; trains the decoder alone."""
    config = choose.default_config()
    stage = config.finetune
    stage.init = "t5_tiny_pydocs"
    stage.epsilon = 8.0
    stage.n_is_public = True
    stage.accountant = "rdp"
    stage.strict = True
    stage.document_length, stage.query_length = 96, 24
    stage.trained = ("*decoder*",)
    stage.batch_size, stage.microbatch_size, stage.steps = 512, 64, 24
    config.axes = (("learning_rate", (1e-3, 4e-3)), ("clip_norm", (0.1, 0.5)))
    return config
