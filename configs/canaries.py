"""Private pairs with canaries: our three forms, repeated 10 and 100 times.

    tfdpsq canaries --config=configs/canaries.py \
        --workdir=WORKDIR/private/canaries --config.data=BEIR

Duration: not stated.
Result: BEIR with secrets, for `finetune` and then `audit`. Not run here as it is;
tests/benchmarks/README.md has an audit with other numbers of canaries.

Each secret has a user of its own, so the pairs suit training, and an audit, with unit
"query" or "user".
"""

from tfdpsq.run.stages import canaries


def get_config():
    """Returns 5 canaries per form and number of repetitions, and 1,000 by a coin."""
    config = canaries.STAGE.config()
    config.coins = 1000
    return config
