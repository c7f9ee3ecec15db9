"""Noise that cancels over an epoch against Poisson batches, on public stand-ins.

    python -m tfdpsq.run.grid --config=configs/grid_noise.py --workdir=DIR

Duration: 12 points of one to five minutes on two cores.
Result: tests/benchmarks/README.md, "Noise that cancels".
"""

import pathlib
import runpy

# An epoch of the 17,753 stand-ins of pydocs: 34 steps of 522.
CANCELLING = {
    "sampler": "shuffled",
    "noise_window": 34,
    "batch_size": 522,
    "microbatch_size": 87,
    "learning_rate": 8e-3,
    "trained": ("*decoder*",),
}


def get_config():
    """Returns four ways to spend ε = 8 on the decoder, three seeds of each."""
    grid = pathlib.Path(__file__).with_name("grid.py")
    config = runpy.run_path(str(grid))["get_config"]()
    config.finetune.accountant = "pld"
    config.finetune.learning_rate = 2e-3  # the best of grid.py
    config.variants = {
        "poisson_48": {"trained": ("*decoder*",), "steps": 48},
        "poisson_96": {"trained": ("*decoder*",), "steps": 96},
        "one_epoch": {**CANCELLING, "steps": 34},
        "two_epochs": {**CANCELLING, "steps": 68},
    }
    config.axes = (("seed", (0, 1, 2)),)
    config.held_out = 2000
    return config
