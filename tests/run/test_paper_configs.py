"""The paper's rows as jobs: of the paper's sizes, and such as the pipeline takes."""

import pathlib

import pytest

from configs.paper import retrieval as paper
from configs.paper import tables
from tfdpsq.run import jobs
from tfdpsq.run.common import training
from tfdpsq.run.frame import settings
from tfdpsq.run.stages.pipeline import STAGE


def _settings(config):
    """Returns a job's settings; its presets would have to be downloaded."""
    config.init = config.retriever_init = "t5_tiny_pydocs"
    config.data = "pydocs"
    return settings.from_config(STAGE.Settings, config)


def test_the_rows_are_those_of_the_tables():
    sizes, epsilons = ("small", "base", "large", "xl"), ("inf", "eps16", "eps8", "eps3")
    expected = {f"synthetic-{s}-{e}" for s in sizes for e in epsilons}
    expected |= {f"direct-{e}" for e in epsilons if e != "inf"} | {"original"}
    assert paper.ROWS.keys() == expected
    for name in ("2", "3", "4", "6"):
        rows = tables.TABLES[name]["paper"].keys()
        assert rows <= expected, name


@pytest.mark.parametrize("row", ["synthetic-xl-eps3", "direct-eps8@1.0", "original"])
def test_a_row_is_a_job_at_the_papers_sizes(row, tmp_path):
    config = paper.get_config(row)
    for init in (config.init, config.retriever_init):
        assert init.startswith("t5_1_0_" if "@1.0" in row else "t5_1_1_")
    kind, size, epsilon = paper.ROWS[row.partition("@")[0]]
    assert size in config.init and "base" in config.retriever_init
    assert list(config.epsilons) == ([epsilon] if kind == "synthetic" else [])
    assert list(config.direct_epsilons) == ([epsilon] if kind == "direct" else [])
    s = _settings(config)
    assert jobs.plan(STAGE.steps(s, tmp_path), tmp_path)
    # 30 epochs in batches of 1,024, and 5 in batches of 32, of the pairs found.
    assert training.with_steps(s.finetune, 532_751).steps == 15_608
    assert training.with_steps(s.retriever, 532_751).steps == 83_242
    # A set of one query for each of 8,841,823 documents has epochs of its own.
    assert training.with_steps(s.retriever, 8_841_823).steps == 1_381_535


def _setting(config, path):
    for part in path.split("."):
        config = config[part]
    return list(config) if isinstance(config, tuple) else config


_OPEN = "the paper does not say; "
# What the paper says, the setting, the value here, and the reason for a difference.
SETTINGS = [
    ("MS MARCO, evaluated on dev", "dev", "evaluate.split", "dev", ""),
    ("example-level guarantee", "pair", "finetune.unit", "pair", ""),
    ("example-level guarantee, direct", "pair", "direct.unit", "pair", ""),
    ("original pairs, all of them", "pair", "retriever.unit", "pair", ""),
    ("delta = 1/(2n): 0 stands for it", 0.0, "finetune.delta", 0.0, ""),
    ("delta of direct DP", 0.0, "direct.delta", 0.0, ""),
    ("30 epochs", 30.0, "finetune.epochs", 30.0, ""),
    ("batch 1024", 1024, "finetune.batch_size", 1024, ""),
    ("document 384 tokens", 384, "finetune.document_length", 384, ""),
    ("query 128 tokens", 128, "finetune.query_length", 128, ""),
    ("prompt", "generate_query: ", "finetune.prompt", "generate_query: ", ""),
    ("DP-Adam", "adam", "finetune.optimizer", "adam", ""),
    ("learning rate 0.001", 1e-3, "finetune.learning_rate", 1e-3, ""),
    ("a constant rate", "constant", "finetune.schedule", "constant", ""),
    ("clip 0.1", 0.1, "finetune.clip_norm", 0.1, ""),
    ("all weights are trained", ["*"], "finetune.trained", ["*"], ""),
    ("no LoRA", 0, "finetune.lora.rank", 0, ""),
    ("nucleus p = 0.8", 0.8, "synthesize.top_p", 0.8, ""),
    ("documents of training pairs", "train", "synthesize.documents", "train", ""),
    ("a query for each document", 1, "synthesize.samples_per_document", 1, ""),
    ("shared T5-base encoder", True, "retriever.shared", True, ""),
    ("document 384, retrieved", 384, "retriever.document_length", 384, ""),
    ("query 128, searched", 128, "retriever.query_length", 128, ""),
    ("retriever rate 0.001", 1e-3, "retriever.learning_rate", 1e-3, ""),
    ("retriever batch 32", 32, "retriever.batch_size", 32, ""),
    ("retriever 5 epochs", 5.0, "retriever.epochs", 5.0, ""),
    ("softmax without temperature", 1.0, "retriever.scale", 1.0, ""),
    ("all other rows as negatives", True, "retriever.false_negatives", True, ""),
    ("the same, direct DP", True, "direct.false_negatives", True, ""),
    ("direct DP, document 384", 384, "direct.document_length", 384, ""),
    ("direct DP, query 128", 128, "direct.query_length", 128, ""),
    ("direct DP, batch 32", 32, "direct.batch_size", 32, ""),
    ("direct DP, clip 0.1", 0.1, "direct.clip_norm", 0.1, ""),
    ("direct DP, rate 0.001", 1e-3, "direct.learning_rate", 1e-3, ""),
    ("DP-SGD on the in-batch softmax", "naive", "direct.method", "naive", ""),
    ("noise for 32 C", True, "direct.unsound", False, "what our proof needs"),
    ("BLEU on the training split", "train", "evaluate.similarity_split", "train", ""),
    (
        "ScaNN, brute force, inner product",
        "scann_brute_force",
        "evaluate.index",
        "scann_brute_force",
        "",
    ),
    ("canaries repeated 10 and 100 times", [10, 100], "canaries.repetitions", None, ""),
    ("100 candidates", 100, "canaries.candidates", 100, ""),
    ("secrets of 10 digits", 10, "canaries.digits", 10, ""),
    ("pooling", None, "retriever.pooling", "mean", _OPEN + "the mean is sentence-T5's"),
    ("accountant", None, "finetune.accountant", "pld", _OPEN + "the tightest"),
    (
        "sampling",
        None,
        "finetune.sampler",
        "poisson",
        _OPEN + "Poisson is what ε by amplification holds for",
    ),
]


@pytest.mark.parametrize("row", ["synthetic-base-eps8", "direct-eps8", "original"])
def test_every_setting_is_the_papers_or_differs_for_a_stated_reason(row):
    """FACTS of the paper against the resolved config, as the stages take it."""
    config = paper.get_config(row)
    for said, theirs, path, ours, reason in SETTINGS:
        found = _setting(config, path)
        assert found == (theirs if ours is None else ours), (said, path)
        assert found == theirs or reason, f"{said}: {path} is {found}, not {theirs}"


# Of XL: the setting, the base's value, the value here, and the reason.
_SAME = "memory alone; the steps are the same"
OF_XL = [
    (
        "optimizer",
        "adam",
        "t5x_adafactor",
        "Adam's slots take twice the weights; the paper also names DP-Adafactor",
    ),
    ("learning_rate", 1e-3, 0.1, "relative to a weight's size"),
    ("lora.rank", 0, 16, "summed gradients of all weights take as much as the weights"),
    ("microbatch_size", 16, 4, _SAME),
    ("rematerialize", False, True, _SAME),
]


def test_sizes_differ_from_the_base_for_a_stated_reason():
    jobs = {name: paper.get_config(f"synthetic-{name}-eps3") for name in paper.SIZES}
    flat = {
        name: dict(_flat(config.finetune.to_dict())) for name, config in jobs.items()
    }
    base = flat["base"]
    for name, found in flat.items():
        changed = {
            (path, base[path], value)
            for path, value in found.items()
            if value != base[path]
        }
        table = OF_XL if name == "xl" else []
        assert changed == {(path, theirs, ours) for path, theirs, ours, _ in table}


def test_every_reason_is_a_deviation_of_the_readme():
    readme = pathlib.Path(paper.__file__).with_name("README.md").read_text("utf-8")
    for *_, reason in (*SETTINGS, *OF_XL):
        assert reason in readme, reason


def _flat(values, before=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value
