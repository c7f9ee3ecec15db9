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

STAGES = ("prepare", "generators", "sets", "retrievers", "evaluation", "audit")
_CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def main(until: str) -> None:
    """Runs the stages up to one of `STAGES`."""
    if until not in STAGES:
        sys.exit(f"error: the stage is {until!r}; choose one of {', '.join(STAGES)}.")
    with contextlib.redirect_stdout(io.StringIO()):  # Keras names its backend
        import keras_nlp  # noqa: F401

    from tfdpsq.run import pipeline

    for name in ("absl", "bm25s", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    scale = os.environ.get("TFDPSQ_NOTEBOOK_SCALE", "default")
    directory = os.environ.get("TFDPSQ_NOTEBOOK_DIR", "/tmp/tfdpsq-notebooks")
    config = runpy.run_path(str(_CONFIGS / "notebooks.py"))["get_config"](scale)
    job = pipeline.open_job(config, pathlib.Path(directory))
    wanted = STAGES[: STAGES.index(until) + 1]
    job.prepare()
    sets = job.generators() if "generators" in wanted else {}
    sets = job.synthetic_sets(sets) if "sets" in wanted else {}
    if "retrievers" in wanted:
        rows = job.retrievers(sets)
        if "evaluation" in wanted:
            job.evaluate(rows, sets)
    if "audit" in wanted:
        job.audit()


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
