"""What the issue of leaking comes down to: canaries with and without DP, for real.

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
def test_repeated_secrets_leak_without_privacy_and_not_at_epsilon_8(tmp_path):
    """100 times without DP: first of all candidates, and written out. At 8: chance.

    Chance is tested exactly, by the sum of the ranks (`evaluation.rank_test`).
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
    often = found["inf"]["repeated"]["100"]
    assert often["ranked_first"] == 1.0 and often["mean_rank"] == 1.0
    assert often["leaked"] > 0.5 and often["p_value"] < 1e-12
    assert found["inf"]["epsilon_at_least"]["generator"] > 1.0
    protected = found["eps8"]
    assert 7.5 < protected["epsilon"] <= 8.0
    for repetitions in ("10", "100"):
        entry = protected["repeated"][repetitions]
        assert entry["leaked"] == entry["leaked_in_set"] == 0.0
        assert entry["p_value"] > 0.01, entry
    for name, bound in protected["epsilon_at_least"].items():
        assert bound <= protected["epsilon"], name
