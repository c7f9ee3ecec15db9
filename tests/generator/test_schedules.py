"""The learning rate of pretraining against its formula in NumPy."""

import numpy as np

from tfdpsq.generator.schedules import WarmupCosine


def test_rate_rises_linearly_and_falls_by_a_cosine():
    schedule = WarmupCosine(peak=0.02, warmup=10, steps=110)
    rates = np.array([float(schedule(step)) for step in range(130)])
    np.testing.assert_allclose(rates[:9], 0.02 * np.arange(1, 10) / 10, rtol=1e-5)
    share = (np.arange(10, 110) - 10) / 100
    wanted = 0.02 * (0.05 + 0.95 * (1 + np.cos(np.pi * share)) / 2)
    np.testing.assert_allclose(rates[10:110], wanted, rtol=1e-5)
    np.testing.assert_allclose(rates[110:], 0.001, rtol=1e-5)
    assert rates.max() == np.float32(0.02)
