"""The tiny T5 fine-tuned with the clipping of tensorflow-privacy's DPKerasAdam.

    tfdpsq finetune --config=configs/dpkeras.py --workdir=OUT

Duration: 2 min 19 s on two cores, beside a run of the tests.
Result: ε 7.985 spent in 10 steps.

Engine "dpkeras" keeps one gradient for every row of a microbatch, so `microbatch_size`
is small; "vectorized" does the same by VectorizedDPKeras. Engine "fast", the default
everywhere else, adds the same clipped sums without these gradients. Noise and
accounting are the plan's in all of them.
"""

from tfdpsq.run.stages import finetune


def get_config():
    """Returns a short run on the embedded corpus."""
    config = finetune.STAGE.config()
    config.pairs = "pydocs"
    config.init = "t5_tiny_manuals"
    config.engine = "dpkeras"
    config.trained = ("*decoder*",)
    config.document_length = 96
    config.query_length = 24
    config.epsilon = 8.0
    config.n_is_public = True
    config.batch_size = 128
    config.microbatch_size = 8
    config.steps = 10
    config.learning_rate = 2e-3
    return config
