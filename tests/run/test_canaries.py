"""Canaries with and without DP, for real.

The T5 that comes with the package, trained on pydocs with canaries among them, by the
benchmark that README's figures come from.
"""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_repeated_secrets_leak_without_privacy_and_less_at_epsilon_8(tmp_path):
    """10 times without DP: first of all candidates, and written out. At 8: not.

    A secret that stands in 100 of 4,000 queries is no secret at ε = 8 for one query:
    it is 100 units of that guarantee. What is asserted of it is that this shows.
    """
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "benchmarks" / "canaries.py"),
            f"--workdir={tmp_path}",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for repetitions in ("10", "100"):
        entry = found["inf"]["repeated"][repetitions]
        assert entry["ranked_first"] == 1.0 and entry["mean_rank"] == 1.0
        assert entry["leaked"] > 0.5 and entry["p_value"] < 1e-12
    assert found["inf"]["epsilon_at_least"]["generator"] > 1.0
    assert found["inf"]["membership_auc"]["likelihood_ratio"][0] > 0.8
    protected = found["eps8"]
    assert 7.5 < protected["epsilon"] <= 8.0
    entry = protected["repeated"]["10"]
    assert entry["leaked"] == entry["leaked_in_set"] == 0.0
    assert entry["mean_rank"] > 3.0
    assert protected["membership_auc"]["likelihood_ratio"][0] < 0.65
    for name, bound in protected["epsilon_at_least"].items():
        assert bound <= protected["epsilon"], name
