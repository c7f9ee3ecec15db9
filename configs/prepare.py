"""Check a BEIR directory, learn a vocabulary, cut public pseudo-queries.

python -m tfdpsq.run.prepare --config=configs/prepare.py --workdir=/tmp/prepare
"""

from tfdpsq.run import prepare


def get_config():
    """The stage's defaults, on the embedded corpus."""
    return prepare.default_config()
