"""Noise that cancels and per-layer clipping against DP-SGD, on public stand-ins.

    python -m tfdpsq.run.grid --config=configs/grid_noise.py --workdir=DIR

Duration: 33 points of one to five minutes on two cores.
Result: tests/benchmarks/README.md, "Noise that cancels".
"""

import pathlib
import runpy

DECODER = {"trained": ("*decoder*",)}
# An epoch of the 17,753 stand-ins of pydocs has 34 batches of 522. More noise in each
# step, which cancels later, is why Adam's rate is four times that of grid.py's best.
CANCELLING = {
    **DECODER,
    "sampler": "shuffled",
    "noise_window": 34,
    "batch_size": 522,
    "microbatch_size": 87,
    "learning_rate": 8e-3,
}
PER_LAYER = {"clip_per_layer": True}


def get_config():
    """Returns eleven ways to spend ε = 8 on the decoder, three seeds of each."""
    grid = pathlib.Path(__file__).with_name("grid.py")
    config = runpy.run_path(str(grid))["get_config"]()
    config.finetune.accountant = "pld"
    config.finetune.learning_rate = 2e-3
    config.variants = {
        "poisson_48": {**DECODER, "steps": 48},
        "poisson_48_per_layer": {**DECODER, **PER_LAYER, "steps": 48},
        "poisson_40_per_layer": {**DECODER, **PER_LAYER, "steps": 40},
        "poisson_36_per_layer": {
            **DECODER,
            **PER_LAYER,
            "steps": 36,
            "learning_rate": 2.3e-3,
        },
        "poisson_96": {**DECODER, "steps": 96},
        "one_epoch": {**CANCELLING, "steps": 34},
        "two_epochs": {**CANCELLING, "steps": 68},
        "four_epochs": {**CANCELLING, "steps": 136, "learning_rate": 6e-3},
        "one_epoch_per_layer": {**CANCELLING, **PER_LAYER, "steps": 34},
        "two_epochs_per_layer": {**CANCELLING, **PER_LAYER, "steps": 68},
        "four_epochs_per_layer": {
            **CANCELLING,
            **PER_LAYER,
            "steps": 136,
            "learning_rate": 6e-3,
        },
    }
    config.axes = (("seed", (0, 1, 2)),)
    config.held_out = 2000
    return config
