"""Parts of quickstart's job that several benchmarks run with other settings."""

import pathlib
import sys

import tensorflow as tf

from tfdpsq.run import finetune, synthesize

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from configs import quickstart  # noqa: E402


def quickstart_job():
    """Returns the config of `configs/quickstart.py`."""
    return quickstart.get_config()


def config_of(stage, home, seed, **settings):
    """Returns a stage's config with these settings, its secrets below `home`."""
    config = stage.copy_and_resolve_references()
    config.seed = seed
    if "private_directory" in config:
        # Of the cell alone: a run's ledger is named after its stage.
        config.private_directory = str(home / "private")
    with config.unlocked():
        config.update(settings)
    return config


def synthetic_set(options, job, epsilon, seed, **trained):
    """Trains a generator and writes its queries, or resumes.

    Args:
      options: with `workdir`, `data` and `documents`, the number of queries.
      job: quickstart's config.
      epsilon: of the generator.
      seed: of both stages.
      **trained: other settings of `finetune`.

    Returns:
      The directory that holds the generator and the set.
    """
    home = options.workdir / f"synthetic-eps{epsilon:g}-seed{seed}"
    common = {"pairs": options.data, "init": job.init, "epsilon": epsilon}
    config = config_of(job.finetune, home, seed, **common, **trained)
    finetune.run(config, home / "generator")
    tf.keras.backend.clear_session()
    writing = {"generator": str(home / "generator"), "corpus": options.data}
    writing["max_documents"] = options.documents
    config = config_of(job.synthesize, home, seed, **writing)
    synthesize.run(config, home / "synthetic")
    tf.keras.backend.clear_session()
    return home
