"""The paper's rows as jobs: of the paper's sizes, and such as the pipeline takes."""

import math
import pathlib

import pytest
import tiny as _tiny

from configs.paper import retrieval as paper
from configs.paper import tables
from tfdpsq import privacy
from tfdpsq.run import pipeline
from tfdpsq.run.core import pipeline_checks
from tfdpsq.run.training import direct_training, private_training

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_rows_are_those_of_the_tables():
    sizes, epsilons = ("small", "base", "large", "xl"), ("inf", "eps16", "eps8", "eps3")
    expected = {f"synthetic-{s}-{e}" for s in sizes for e in epsilons}
    expected |= {f"direct-{e}" for e in epsilons if e != "inf"} | {"original"}
    assert paper.ROWS.keys() == expected
    for name in "346":
        rows = tables.TABLES[name]["paper"].keys()
        assert rows <= expected, name


@pytest.mark.parametrize("row", list(paper.ROWS))
def test_a_row_is_a_job_at_the_papers_sizes(row):
    config = paper.get_config(row)
    kind, size, epsilon = paper.ROWS[row]
    assert size in config.init and "base" in config.retriever_init
    # Presets that would have to be downloaded.
    config.init = config.retriever_init = "t5_tiny_pydocs"
    pipeline_checks.check_settings(config)
    assert list(config.epsilons) == ([epsilon] if kind == "synthetic" else [])
    assert list(config.direct_epsilons) == ([epsilon] if kind == "direct" else [])
    # 30 epochs in batches of 1,024; 5 in batches of 32.
    assert config.finetune.steps * 1024 == pytest.approx(30 * 533_000, rel=1e-4)
    assert config.retriever.steps * 32 == pytest.approx(5 * 533_000, rel=1e-4)
    assert config.direct.steps == config.retriever.steps
    for stage in (config.finetune, config.direct):
        assert (stage.clip_norm, stage.learning_rate) == (0.1, 1e-3)
        assert (stage.document_length, stage.query_length) == (384, 128)
        assert stage.delta == 0  # 1/(2n)
    assert config.synthesize.top_p == 0.8
    assert config.direct.method == "naive"


def test_what_a_row_costs_can_be_planned_at_its_size():
    units = private_training.Units(paper.PAIRS, None, True)
    config = paper.get_config("synthetic-base-eps3").finetune
    config.epsilon, config.accountant = 3.0, "rdp"
    plan = privacy.make_plan(private_training.spec_of(config, units))
    assert plan.spec.target_delta == pytest.approx(0.5 / paper.PAIRS)
    assert 0.4 < plan.noise_multiplier < 1.0 and plan.sensitivity == 0.1
    config = paper.get_config("direct-eps3").direct
    config.epsilon, config.accountant = 3.0, "rdp"
    plan = direct_training.make_plan(config, units)
    assert plan.max_batch_size >= 64
    assert plan.sensitivity == pytest.approx(0.1 * (2 * plan.max_batch_size - 1))


def test_an_unknown_row_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="synthetic-base-eps8"):
        paper.get_config("synthetic-base-eps5")


@pytest.mark.slow
@pytest.mark.parametrize("row", ["synthetic-small-eps16", "direct-eps16"])
def test_a_row_runs_at_a_tiny_size(row, tmp_path):
    """Everything but the sizes is the row's."""
    _tiny.write_pairs(tmp_path / "pairs")
    config, tiny = paper.get_config(row), _tiny.tiny_config(tmp_path / "pairs")
    for field in ("data", "examples", "init", "retriever_init", "prepare", "pretrain"):
        config[field] = tiny[field]
    for name in ("finetune", "synthesize", "retriever", "direct"):
        for field in (
            "t5",
            "document_length",
            "query_length",
            "batch_size",
            "microbatch_size",
            "steps",
            "embedding_dim",
            "max_documents",
            "accountant",
        ):
            if field in tiny[name]:
                config[name][field] = tiny[name][field]
    results = pipeline.run(config, tmp_path / "work")
    kind, _, epsilon = paper.ROWS[row]
    name = f"{kind}_eps{epsilon:g}"
    (found,) = [r for r in results["rows"] if r["name"] == name]
    assert found["ndcg@10"] >= 0 and math.isfinite(found["ndcg@10"])
