"""Keeps what a job rightly forgets: its seeds, and which rows its steps drew.

A finished stage deletes its seeds. To look for them in what it released, somebody
must have kept them: a test's config calls `record` in the job's own process.
"""

import functools
import json
import pathlib

import numpy as np

SECRETS, DRAWS = "secrets.jsonl", "draws.jsonl"


def record(folder):
    """From now on, seeds and drawn rows are appended to files in `folder`.

    secrets.jsonl: {"directory": ..., "run": ..., "seed": ..., "settings": ...}
    draws.jsonl: {"step": ..., "rows": [...]}
    """
    from tfdpsq.privacy import checkpoint
    from tfdpsq.privacy.randomness import sampling

    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)

    def append(name, entry):
        with open(folder / name, "a") as file:
            file.write(json.dumps(entry) + "\n")

    open_secrets = checkpoint.open_secrets

    @functools.wraps(open_secrets)
    def recorded_secrets(directory, *arguments):
        found = open_secrets(directory, *arguments)
        on_disk = pathlib.Path(directory) / checkpoint.STATE / checkpoint.SECRETS
        held = json.loads(on_disk.read_text())
        append(SECRETS, {"directory": str(directory), **held})
        return found

    def recorded(draw):
        @functools.wraps(draw)
        def recorded_draw(self, step):
            drawn = draw(self, step)
            rows = np.asarray(drawn.indices)[: drawn.count].tolist()
            append(DRAWS, {"step": step, "rows": rows})
            return drawn

        return recorded_draw

    checkpoint.open_secrets = recorded_secrets
    for sampler in (sampling.PoissonSampler, sampling.ShuffledSampler):
        sampler.draw = recorded(sampler.draw)
