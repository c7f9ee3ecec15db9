"""Advice on a dtype that is slow on a device."""

import pytest

from tfdpsq.run import encode, finetune, pipeline, synthesize
from tfdpsq.run.devices import dtypes


def test_float32_on_a_tpu_is_remarked_upon_and_left_alone():
    for stage in (finetune, synthesize, encode):
        config = stage.default_config()
        (line,) = dtypes.advice(config, "tpu")
        assert "--config.dtype=mixed_bfloat16" in line
        config.dtype = "mixed_bfloat16"  # as the line says
        assert dtypes.advice(config, "tpu") == []


@pytest.mark.parametrize(
    "info, has",
    [
        ("flags\t\t: fpu sse avx512f avx512_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("vmx flags\t: ept\nflags\t\t: fpu sse avx512f avx512_vnni\n", False),
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
    config.synthesize.dtype = "mixed_bfloat16"
    assert len(dtypes.advice(config, "default")) == (not has)
