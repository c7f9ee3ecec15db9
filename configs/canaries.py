"""Private pairs with canaries among them: the paper's three forms, 10 and 100 times.

python -m tfdpsq.run.canaries --config=configs/canaries.py \
    --workdir=WORKDIR/private/canaries --config.data=BEIR
"""

from tfdpsq.run import canaries


def get_config():
    """Five of each form and number of repetitions, and 1,000 by a coin."""
    config = canaries.default_config()
    config.coins = 1000
    return config
