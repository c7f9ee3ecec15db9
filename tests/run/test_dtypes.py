"""Advice on a dtype that is slow on a device."""

import pytest

from tfdpsq.run import (
    encode,
    evaluate,
    finetune,
    index,
    pipeline,
    pretrain,
    synthesize,
    train_retriever,
    zero_shot,
)
from tfdpsq.run.devices import dtypes


def test_float32_on_a_tpu_is_remarked_upon_and_left_alone():
    config = finetune.default_config()
    (line,) = dtypes.advice(config, "tpu")
    assert line.startswith("dtype is 'float32', but a TPU's matrix units")
    assert "--config.dtype=mixed_bfloat16" in line
    assert config == finetune.default_config()
    config.dtype = "mixed_bfloat16"  # as the line says
    assert dtypes.advice(config, "tpu") == []


def test_of_a_whole_job_the_setting_is_named():
    config = pipeline.default_config()
    lines = dtypes.advice(config, "tpu")
    stages = ["direct", "evaluate", "finetune", "pretrain", "retriever", "synthesize"]
    assert sorted(line.split(".")[0] for line in lines) == stages
    for line, stage in zip(sorted(lines), stages):
        assert f"--config.{stage}.dtype=mixed_bfloat16" in line


@pytest.mark.parametrize(
    "stage", [pretrain, train_retriever, synthesize, encode, index, evaluate, zero_shot]
)
def test_every_stage_with_products_is_told(stage):
    config = stage.default_config()
    assert len(dtypes.advice(config, "tpu")) == 1
    config.dtype = "mixed_bfloat16"
    assert dtypes.advice(config, "tpu") == []


@pytest.mark.parametrize(
    "info, has",
    [
        ("flags\t\t: fpu sse avx512f avx512_bf16\n", True),
        ("model : 1\nflags\t\t: fpu sse amx_bf16 amx_int8\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("vmx flags\t: ept\nflags\t\t: fpu sse avx512f avx512_vnni\n", False),
        ("Features\t: fp asimd\n", False),
        ("", True),  # nothing is known
    ],
)
def test_bfloat16_is_remarked_upon_where_the_processor_lacks_it(
    info, has, tmp_path, monkeypatch
):
    (tmp_path / "cpuinfo").write_text(info)
    assert dtypes.multiplies_bfloat16(tmp_path / "cpuinfo") == has
    monkeypatch.setattr(dtypes, "multiplies_bfloat16", lambda: has)
    config = pipeline.default_config()
    assert dtypes.advice(config, "default") == []
    config.synthesize.dtype = config.evaluate.dtype = "mixed_bfloat16"
    lines = dtypes.advice(config, "default")
    expected = [] if has else ["evaluate.dtype", "synthesize.dtype"]
    assert sorted(line.split()[0] for line in lines) == expected
