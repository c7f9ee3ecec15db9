"""Advice on a `dtype` that is slow on the device at hand; it is never changed."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_CPU_INFO = "/proc/cpuinfo"
# Instructions for products in bfloat16, of x86 and of Arm.
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}
# How the line of a processor's features begins, on x86 and on Arm.
_FEATURES = ("flags", "Features")


def advice(config: Any, kind: str) -> list[str]:
    """Returns a line for each `dtype` of a config that makes its device slow.

    `config` is of a stage, or of several as a config of configs; `kind` is that of the
    strategy.
    """
    if kind == "tpu":
        return [
            f"{name} is 'float32', but a TPU's matrix units multiply bfloat16: "
            f"--config.{name}=mixed_bfloat16 lets them, in less memory "
            "(weights, softmax and norms stay float32). It is not changed, as the "
            "result depends on it."
            for name, stage in _dtypes(config)
            if stage["dtype"] == "float32"
        ]
    if multiplies_bfloat16():
        return []
    return [
        f"{name} is 'mixed_bfloat16', but this processor has no instructions for it: "
        "on such a one generation took 2.6 times as long as in float32, and embedding "
        "1.7 times. "
        f"--config.{name}=float32 is faster here. It is not changed, as the result "
        "depends on it."
        for name, stage in _dtypes(config)
        if stage["dtype"] == "mixed_bfloat16"
    ]


def multiplies_bfloat16(cpu_info: str | os.PathLike = _CPU_INFO) -> bool:
    """Returns whether there is a GPU, or a processor that multiplies bfloat16.

    Where nothing is known of the processor (not Linux), it is taken to be one.
    """
    if tf.config.list_physical_devices("GPU"):
        return True
    try:
        text = pathlib.Path(cpu_info).read_text("utf-8")
    except OSError:
        return True
    lines = [line for line in text.splitlines() if line.startswith(_FEATURES)]
    return not lines or bool(_BFLOAT16 & set(lines[0].split()))


def _dtypes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name of every `dtype`, and the config it is of."""
    if isinstance(config.get("dtype"), str):
        yield f"{prefix}dtype", config
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from _dtypes(value, f"{prefix}{key}.")
