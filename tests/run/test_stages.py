"""Each stage by itself, through the command line and the config README names."""

import json
import os
import pathlib
import resource
import subprocess
import sys

import pytest
from helpers import forking
from helpers import tiny as _tiny

from tfdpsq.privacy import read_certificate

_TESTS = pathlib.Path(__file__).parents[1]
_ROOT = _TESTS.parent

_T5 = {
    "t5.vocabulary_size": 320,
    **_tiny.FLAGS,
    "document_length": 24,
    "query_length": 10,
}


def _stage(name, workdir, run=forking.run, **options):
    config = _ROOT / "configs" / f"{name}.py"
    done = run(
        [
            sys.executable,
            "-m",
            f"tfdpsq.run.{name}",
            *([f"--config={config}"] if config.is_file() else []),
            f"--workdir={workdir}",
            *(f"--config.{key}={value}" for key, value in options.items()),
        ],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )
    return done.returncode, done.stderr


def _on_a_full_disk(words, **options):
    """Runs a command in a process of its own, whose files hold at most 8 kB each."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    return subprocess.run(
        words, capture_output=True, text=True, preexec_fn=limit, **options
    )


def _passes(name, workdir, **options):
    status, errors = _stage(name, workdir, **options)
    assert status == 0, errors[-3000:]


@pytest.mark.slow  # the pipeline runs the same stages, test_finetune_resume a command
def test_the_stages_chain_by_their_directories(tmp_path):
    _tiny.write_pairs(tmp_path / "pairs")
    pairs = str(tmp_path / "pairs")
    _passes("prepare", tmp_path / "prepare", data=pairs, vocabulary_size=320)
    vocabulary = str(tmp_path / "prepare" / "vocabulary" / "spiece.model")
    _passes(
        "finetune",
        tmp_path / "generator",
        pairs=pairs,
        vocabulary=vocabulary,
        batch_size=8,
        microbatch_size=4,
        steps=2,
        accountant="rdp",
        n_bound=80,
        **_T5,
    )
    assert read_certificate(tmp_path / "generator")["sampler"]["n"] == 80
    stage = json.loads((tmp_path / "generator" / "stage.json").read_text())
    config = stage["config"]
    assert config["clip_norm"] == 0.1 and config["batch_size"] == 8
    _passes(
        "synthesize",
        tmp_path / "synthetic",
        generator=str(tmp_path / "generator"),
        vocabulary=vocabulary,
        corpus=pairs,
        document_length=24,
        query_length=10,
    )
    _passes(
        "train_retriever",
        tmp_path / "retriever",
        pairs=str(tmp_path / "synthetic" / "set"),
        vocabulary=vocabulary,
        embedding_dim=8,
        batch_size=8,
        steps=2,
        **_T5,
    )
    _passes(
        "encode",
        tmp_path / "encoded",
        retriever=str(tmp_path / "retriever"),
        vocabulary=vocabulary,
        corpus=pairs,
    )
    _passes(
        "evaluate",
        tmp_path / "evaluation",
        data=pairs,
        vocabulary=vocabulary,
        resamples=100,
        **{
            "systems.mine": str(tmp_path / "retriever"),
            "indexes.mine": str(tmp_path / "encoded"),
        },
    )
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert set(metrics["systems"]) == {"bm25", "mine"}
    assert metrics["systems"]["bm25"]["ndcg@10"] > 0


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("prepare", {"data": "/nowhere"}, "/nowhere"),
        ("finetune", {"vocabulary": "/nowhere/spiece.model"}, "spiece.model"),
    ],
)
def test_errors_are_one_line_with_status_two(tmp_path, name, options, message):
    status, errors = _stage(name, tmp_path / "out", **options)
    assert status == 2
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("error: ")
    assert message in errors.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path):
    """Files may not grow beyond 8 kB, as on a disk that is nearly full."""
    _tiny.write_pairs(tmp_path / "pairs")
    status, errors = _stage(
        "prepare",
        tmp_path / "out" / "prepare",
        run=_on_a_full_disk,
        data=str(tmp_path / "pairs"),
        vocabulary_size=320,
    )
    assert status == 2, errors[-2000:]
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("error: ")
    assert not list((tmp_path / "out").rglob("*"))
