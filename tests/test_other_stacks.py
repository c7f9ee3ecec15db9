"""The layers and the engine on the pinned stack and on others, number by number."""

import subprocess
import sys

import numpy as np
import pytest
from helpers import other_stacks

_STACKS = [("python3.12", "2.21.0"), ("python3.11", "2.18.1")]


@pytest.fixture(scope="module")
def pinned():
    return other_stacks.check(sys.executable, PYTHONPATH=str(other_stacks.ROOT))


@pytest.fixture(scope="module", params=_STACKS, ids="-".join)
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
def test_the_same_epsilon_sums_and_training_on_every_stack(python, pinned):
    found = other_stacks.check(python)
    assert found["keras"].startswith("tf_keras")
    for name in ("classifier", "recommender"):
        own, other = pinned[name], found[name]
        assert own["off"] <= 1e-5 and other["off"] <= 1e-5  # of the float64 loop
        np.testing.assert_allclose(other["sums"], own["sums"], atol=1e-5, rtol=1e-5)
        assert other["epsilon"] == pytest.approx(own["epsilon"], rel=1e-9)
        for optimizer, weights in own["trained"].items():
            # The same rows, dropout and noise: nothing but rounding is between them.
            np.testing.assert_allclose(
                other["trained"][optimizer], weights, rtol=1e-4, atol=1e-4
            )
    np.testing.assert_allclose(found["noise"], pinned["noise"], rtol=1e-6)
    assert found["dropped"] == pinned["dropped"]


@pytest.mark.slow
def test_plain_layers_work_on_keras_3_and_the_rest_is_refused(python, pinned):
    found = other_stacks.check(python, keras3=True)
    assert found["keras"].startswith("keras 3")
    assert found["layers"] == pinned["layers"]
    assert found["dropped"] == pinned["dropped"]
    assert "tfdpsq.privacy" in found["refused"]
