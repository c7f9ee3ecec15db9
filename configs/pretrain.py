"""A public T5: `python -m tfdpsq.run.pretrain --config=configs/pretrain.py ...`.

The defaults are those of `t5_tiny_pydocs`.
"""

from tfdpsq.run import pretrain


def get_config():
    """The settings; what is not set here keeps the stage's default."""
    return pretrain.default_config()
