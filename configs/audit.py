"""What a generator that was trained on canaries tells of them, and its set.

python -m tfdpsq.run.audit --config=configs/audit.py --workdir=WORKDIR/private/audit \
    --config.canaries=WORKDIR/private/canaries --config.generator=GENERATOR \
    --config.synthetic=SET
"""

from tfdpsq.run import audit


def get_config():
    """All attacks at 95 %."""
    return audit.default_config()
