"""The benchmark of kills, at three of them: stages that are killed go on."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest

_FILE = pathlib.Path(__file__).parents[1] / "benchmarks" / "kills.py"


def test_each_stage_reads_stages_that_are_there_before_it(monkeypatch):
    """`rerank` named one that was not, which ended the benchmark at its 18th kill."""
    monkeypatch.syspath_prepend(str(_FILE.parent))
    kill_stages = importlib.import_module("kill_stages")
    known = set()
    for stage in kill_stages.stages():
        assert set(kill_stages.named(stage.settings)) <= known, stage.name
        known.add(stage.name)


@pytest.mark.slow
def test_three_kills_of_three_stages(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            str(_FILE),
            f"--workdir={tmp_path / 'kills'}",
            "--kills=3",
            "--forked",
            "--stages=finetune,canaries,overlap",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    # keras-nlp announces its backend, too.
    written = (line for line in done.stdout.splitlines() if line.startswith("{"))
    lines = list(map(json.loads, written))
    assert done.returncode == 0, (lines, done.stderr[-2000:])
    *kills, summary = lines
    assert {line["stage"] for line in kills} == {"finetune", "canaries", "overlap"}
    # 84 queries and the key at least; a private run's two seeds besides.
    assert all(line["secrets_searched"] >= 85 for line in kills)
    assert (summary["kills"], summary["ok"], summary["failed"]) == (3, 3, [])
