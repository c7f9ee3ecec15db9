"""A T5-small generator at the paper's settings.

    tfdpsq finetune --config=configs/finetune.py --workdir=OUT \
        --config.pairs=BEIR --config.init=T5 --config.n_bound=600000

Duration: not run here.
Result: not run here.

Carranza et al. 2024, section 5: batch 1024, 30 epochs, learning rate 0.001, clip norm
0.1, δ = 1/(2n), documents of 384 and queries of 128 tokens. `steps` is 30 epochs of MS
MARCO's 533k pairs; set it to 30 · n / 1024 for other data. `n_bound` is a public upper
bound on the number of pairs; `n_is_public=True` declares instead that their exact
number may be published.
"""

from tfdpsq.run.stages import finetune


def get_config():
    """Returns the paper's values; `init`, where given, determines the shape."""
    config = finetune.STAGE.config()
    config.epsilon = 8.0
    config.steps = 15_600
    config.batch_size = 1024
    return config
