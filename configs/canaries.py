"""Private pairs with canaries among them: the paper's three forms, 10 and 100 times.

python -m tfdpsq.run.canaries --config=configs/canaries.py \
    --workdir=WORKDIR/private/canaries --config.data=BEIR

Each secret has a user of its own, so that the result can be trained on with unit
"query" or "user", and audited for either.
"""

from tfdpsq.run import canaries


def get_config():
    """Five of each form and number of repetitions, and 1,000 by a coin."""
    config = canaries.default_config()
    config.coins = 1000
    return config
