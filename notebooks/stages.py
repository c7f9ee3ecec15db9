"""Runs the stages of the notebooks' job, up to one of them.

    python notebooks/stages.py prepare|generators|sets|retrievers|evaluation|audit

The job is configs/notebooks.py, at the scale and in the directory that
TFDPSQ_NOTEBOOK_SCALE and TFDPSQ_NOTEBOOK_DIR say. A finished stage is not run again.
Run it in the environment of `environment.make`.
"""

import contextlib
import io
import logging
import os
import pathlib
import runpy
import sys

# By what the names of their steps start with.
STAGES = {
    "prepare": "prepare",
    "generators": "generator_",
    "sets": "synthetic_",
    "retrievers": "retriever_",
    "evaluation": "evaluation",
    "audit": ("canaries", "audit"),
}
_CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def main(until: str) -> None:
    """Runs the stages up to one of `STAGES`."""
    if until not in STAGES:
        sys.exit(f"error: the stage is {until!r}; choose one of {', '.join(STAGES)}.")
    with contextlib.redirect_stdout(io.StringIO()):  # Keras names its backend
        import keras_nlp  # noqa: F401

    from tfdpsq.run import jobs
    from tfdpsq.run.frame import runner, settings
    from tfdpsq.run.stages.pipeline import STAGE

    for name in ("absl", "bm25s", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    scale = os.environ.get("TFDPSQ_NOTEBOOK_SCALE", "default")
    workdir = pathlib.Path(
        os.environ.get("TFDPSQ_NOTEBOOK_DIR", "/tmp/tfdpsq-notebooks")
    )
    config = runpy.run_path(str(_CONFIGS / "notebooks.py"))["get_config"](scale)
    s = settings.from_config(STAGE.Settings, config)
    planned = jobs.plan(STAGE.steps(s, workdir), workdir)
    jobs.write_list(STAGE, s, planned, workdir)
    for stage, names in STAGES.items():
        for each in planned:
            if each.step.name.startswith(names):
                runner.execute(each.step.stage, each.settings, each.place)
        if stage == until:
            break


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
