"""The job of the notebooks: the quickstart, smaller, and with an audit.

    tfdpsq pipeline --config=configs/notebooks.py \
        --workdir=/tmp/tfdpsq-notebooks

Duration: about 12 minutes on two cores, by the times that the notebooks state.
Result: the outputs in notebooks/.

The notebooks run its stages one by one in the same workdir; a finished stage is not run
again. The corpus is the part of pydocs from the packages in `PACKAGES`.
`--config=configs/notebooks.py:small` runs the same stages in a minute or two; its
numbers mean nothing.
"""

import math
import pathlib
import runpy

from tfdpsq import data, validation

PACKAGES = {
    "default": ("numpy", "python", "scipy", "sklearn"),
    "small": ("absl", "ml_collections", "tqdm"),
}

_QUICKSTART = str(pathlib.Path(__file__).with_name("quickstart.py"))


def get_config(scale="default"):
    """Returns the settings; all others are those of the quickstart."""
    validation.one_of("scale", scale, tuple(PACKAGES))
    config = runpy.run_path(_QUICKSTART)["get_config"]()
    config.data = str(data.build_pydocs(packages=PACKAGES[scale]).path)
    config.epsilons = (math.inf, 8.0)
    config.direct_epsilons = ()
    config.audit_epsilons = (math.inf, 8.0)
    config.rerank = False  # as in notebooks/stages.py
    config.finetune.batch_size = 128
    config.evaluate.resamples = 10_000
    config.synthesize.max_documents = 1280
    config.retriever.steps = 40
    config.evaluate.similarity.update(samples=500, seeds=3)
    config.canaries.update(repetitions=(1, 10, 50), trials=2, coins=100)
    config.audit.members = 300
    if scale == "small":
        config.finetune.accountant = "rdp"
        config.finetune.batch_size = config.finetune.microbatch_size = 16
        config.finetune.steps = 2
        config.synthesize.max_documents = 32
        config.synthesize.max_length = 8
        config.retriever.batch_size = 8
        config.retriever.steps = 2
        config.evaluate.resamples = 200
        config.evaluate.similarity.update(samples=100, seeds=2)
        config.canaries.update(repetitions=(2,), trials=1, coins=24)
        config.audit.members = 10
    return config
