"""Write synthetic queries with a trained generator: nucleus sampling at p = 0.8.

python -m tfdpsq.run.synthesize --config=configs/synthesize.py --workdir=OUT \
    --config.generator=GENERATOR_DIR --config.vocabulary=SPIECE_MODEL \
    --config.corpus=BEIR_DIR
"""

from tfdpsq.run import synthesize


def get_config():
    """The paper's values: one query a document, p = 0.8."""
    return synthesize.default_config()
