"""The data, T5s and config of the paper's tables at the smallest size."""

from configs.paper import tables as paper
from helpers import tiny, tiny_sets
from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config
from tfdpsq.run.common import benchmark_sets


def write(base):
    """Writes pairs, zero-shot sets and T5s; returns their directory."""
    tiny.write_pairs(base / "pairs", train=80, dev=16, test=8)
    texts = [d.content for d in BeirDirectory(base / "pairs").documents()]
    digits = [" ".join("0123456789")] * 40
    train_vocabulary([*texts, *digits], 320, base / "spiece.model")
    train_vocabulary([*texts[:60], *digits], 300, base / "other.model")
    for name in benchmark_sets.PAPER:
        if name == benchmark_sets.CQADUPSTACK:
            for seed, forum in enumerate(benchmark_sets.FORUMS):
                tiny_sets.write(base / "beir" / name / forum, seed, queries=2)
        else:
            tiny_sets.write(base / "beir" / name, len(name))
    shape = T5Config(330, 1, 2, 8, 16, 8, "1.1", dropout=0.0)
    model = T5QueryGenerator(shape)
    for name, vocabulary in (("t5", "spiece.model"), ("other", "other.model")):
        (base / name).mkdir()
        model.save_to_huggingface(base / name, base / vocabulary)
    return base


def settings(base):
    """Returns a user's settings for scale "paper", with the fewest steps."""
    return {
        "job.data": str(base / "pairs"),
        **{f"sets.{name}": str(base / "beir" / name) for name in benchmark_sets.PAPER},
        **{f"sizes.{size}.init": str(base / "t5") for size in paper.SIZES},
        "job.finetune.batch_size": 16,
        "job.finetune.microbatch_size": 8,
        "job.finetune.epochs": 0.5,
        "job.finetune.document_length": 96,
        "job.finetune.query_length": 64,
        "job.finetune.accountant": "rdp",
        "job.synthesize.max_length": 24,
        "job.retriever.epochs": 0.25,
        "job.retriever.batch_size": 8,
        "job.retriever.document_length": 32,
        "job.retriever.query_length": 12,
        "job.direct.batch_size": 4,
        "job.direct.document_length": 32,
        "job.direct.query_length": 12,
        "job.direct.accountant": "rdp",
        "job.evaluate.similarity.init": str(base / "t5"),
        "examples_about": ("number 70.",),
        "overlap.corpus": (str(base / "pairs" / "corpus.jsonl"),),
        "job.canaries.trials": 1,
        "job.canaries.document_characters": 20,
        "job.canaries.query_characters": 20,
        "job.audit.members": 6,
        "job.evaluate.resamples": 100,
    }


def config(base, **changes):
    """Returns the config of scale "paper" with these settings, and changes."""
    found = paper.get_config("paper")
    grid = {"clip_norm": (0.1, 0.5), "batch_size": (16,), "epochs": (0.5,)}
    with found.unlocked():
        found.tables["1"] = paper.grid_table("small", grid, 60)
        for name, point in paper.points("small", grid).items():
            found.sizes[name] = {"init": str(base / "t5"), "finetune": point}
    found.update_from_flattened_dict({**settings(base), **changes})
    return found
