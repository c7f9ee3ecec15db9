"""What is said of a TPU, where there is none."""

import pytest

from tfdpsq.run import finetune, pipeline, pretrain, train_retriever
from tfdpsq.run.devices import tpus


def test_float32_on_a_tpu_is_remarked_upon_and_left_alone():
    config = finetune.default_config()
    (line,) = tpus.advice(config)
    assert line.startswith("dtype is 'float32', but a TPU's matrix units")
    assert "--config.dtype=mixed_bfloat16" in line
    assert config == finetune.default_config()
    config.dtype = "mixed_bfloat16"  # as the line says
    assert tpus.advice(config) == []


def test_of_a_whole_job_the_setting_is_named():
    config = pipeline.default_config()
    # Synthesis has a dtype, too, but no TPU to use it on.
    assert config.synthesize.dtype == "float32"
    (line,) = tpus.advice(config)
    assert "--config.finetune.dtype=mixed_bfloat16" in line


@pytest.mark.parametrize("stage", [pretrain, train_retriever])
def test_where_there_is_no_choice_nothing_is_said(stage):
    assert tpus.advice(stage.default_config()) == []
