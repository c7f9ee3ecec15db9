"""The layers and the engine on the pinned stack and on others, number by number."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import other_stacks, stack_checks


def test_mechanism_checks_pass_on_this_stack():
    assert abs(stack_checks.check_mechanism(tf.keras)["deviation"] - 1) < 0.02


@pytest.fixture(scope="module")
def pinned():
    return other_stacks.check(sys.executable, PYTHONPATH=str(other_stacks.ROOT))


@pytest.fixture(
    scope="module",
    params=[("python3.12", "2.21.0"), ("python3.11", "2.18.1")],
    ids="-".join,
)
def python(request, tmp_path_factory):
    """Python of another stack, with the extra `privacy`."""
    name, tensorflow = request.param
    found = other_stacks.find(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    folder = tmp_path_factory.mktemp("other") / "environment"
    try:
        return other_stacks.make(found, tensorflow, folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the environment cannot be made: {error}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_other_stacks_give_the_same_epsilon_sums_and_weights(python, pinned):
    found = other_stacks.check(python)
    assert found["keras"].startswith("tf_keras")
    assert pinned["off"] <= 1e-5 and found["off"] <= 1e-5  # from the float64 loop
    np.testing.assert_allclose(found["sums"], pinned["sums"], atol=1e-5, rtol=1e-5)
    assert found["epsilon"] == pytest.approx(pinned["epsilon"], rel=1e-9)
    for optimizer, weights in pinned["trained"].items():
        # The same rows, dropout and noise: only rounding is between them.
        other = found["trained"][optimizer]
        np.testing.assert_allclose(other, weights, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["noise"], pinned["noise"], rtol=1e-6)
    assert found["dropped"] == pinned["dropped"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_keras_3_has_the_plain_layers_and_refuses_the_rest(python, pinned):
    found = other_stacks.check(python, keras3=True)
    assert found["keras"].startswith("keras 3")
    assert found["layers"] == pinned["layers"]
    assert found["dropped"] == pinned["dropped"]
    assert "tfdpsq.privacy" in found["refused"]
