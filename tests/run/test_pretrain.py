"""Public pretraining as its users run it: it learns, is killed, goes on, refuses."""

import contextlib
import json
import os
import signal
import sys
import time

import numpy as np
import pytest
from helpers import forking, killing, tiny
from safetensors.numpy import load_file

from tfdpsq import privacy, validation
from tfdpsq.data import Tokenizer, build_pydocs, train_vocabulary
from tfdpsq.data.pydocs import PUBLIC_TEXT
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.run import pretrain
from tfdpsq.run.core import sources
from tfdpsq.run.devices import preemption, strategy


def _config(data, **changes):
    config = pretrain.default_config()
    config.data = str(data)
    config.t5.update({"vocabulary_size": 360, **tiny.SHAPE, "dropout": 0.2})
    config.update(
        {
            "document_length": 40,
            "query_length": 16,
            "batch_size": 8,
            "held_out_one_in": 8,
            "steps": 12,
            "save_every": 4,
            "warmup": 2,
            "stored": "float32",
            **changes,
        }
    )
    return config


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs whose queries and judgements are unreadable, so reading one fails."""
    directory = tmp_path_factory.mktemp("data") / "pairs"
    tiny.write_pairs(directory, train=150, dev=5, test=5)
    for path in (directory / "queries.jsonl", *(directory / "qrels").iterdir()):
        path.write_text("not to be read")
    return directory


@pytest.fixture(scope="module")
def finished(pairs, tmp_path_factory):
    """A run that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "t5"
    pretrain.run(_config(pairs), out)
    return out


def test_result_loads_as_any_t5(finished):
    model = T5QueryGenerator.from_preset(finished)
    tokenizer = Tokenizer(sources.vocabulary_file("", str(finished)))
    assert model.config.vocabulary_size == tokenizer.vocabulary_size == 360
    record = json.loads((finished / pretrain.CURVE_FILE).read_text())
    assert record["steps"] == [4, 8, 12]
    assert record["rows"]["held_out"] >= 2
    assert not list(finished.parent.glob(".*state*"))  # nothing is left over


# -- Ended, and gone on with ----------------------------------------------------------


def _assert_same(out, finished):
    ours, theirs = (load_file(path / "model.safetensors") for path in (out, finished))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-4, atol=1e-5)
    curve, whole = (
        json.loads((path / pretrain.CURVE_FILE).read_text()) for path in (out, finished)
    )
    assert curve["steps"] == whole["steps"]
    for name in ("held_out", "losses"):
        for one, other in zip(curve[name], whole[name]):
            # In the gap each replica has its own wrong documents.
            for what in set(other) - {"gap"}:
                assert one[what] == pytest.approx(other[what], abs=2e-3)


class _AskedAt(preemption.Notice):
    """A preemption notice that arrives during a given step."""

    def __init__(self, step):
        super().__init__()
        self._left = step

    @contextlib.contextmanager
    def training(self):
        def asked():
            self._left -= 1
            return self._left <= 0

        yield asked


@pytest.mark.parametrize(
    "before, after, step, changes",
    [
        (1, 1, 5, {}),
        pytest.param(2, 1, 5, {}, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, {"optimizer": "adam"}, marks=pytest.mark.slow),
    ],
)
def test_preempted_run_goes_on_with_other_replicas_to_the_same_weights(
    pairs, finished, strategy_of, tmp_path, before, after, step, changes
):
    """With dropout.

    Adam's steps are clipped, and Adafactor's are of the size that its statistics say:
    neither is the same where a share's gradient is taken for all.
    """
    wanted, config = finished, _config(pairs, **changes)
    if changes:
        wanted = tmp_path / "whole"
        pretrain.run(config, wanted)
    devices = strategy.Devices(strategy_of(before), notice=_AskedAt(step))
    with pytest.raises(privacy.Preempted):
        pretrain.run(config, tmp_path / "t5", devices)
    assert not (tmp_path / "t5").exists()
    pretrain.run(config, tmp_path / "t5", strategy.Devices(strategy_of(after)))
    _assert_same(tmp_path / "t5", wanted)


def _start(base, pairs, *flags):
    """The stage in a process of its own, into base/t5."""
    config = base / "config.py"
    config.write_text(
        "import runpy\n"
        "def get_config():\n"
        f"    return runpy.run_path({str(__file__)!r})['_config']({str(pairs)!r})\n"
    )
    return forking.Command(
        [
            sys.executable,
            "-m",
            "tfdpsq.run.pretrain",
            f"--config={config}",
            f"--workdir={base / 't5'}",
            *flags,
        ],
        cwd=killing.ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _wait_for_a_state(base, child):
    state = base / ".t5.state" / "backup" / "chief" / "checkpoint"
    deadline = time.monotonic() + 300
    while not state.is_file():
        assert child.poll() is None, child.said()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_run_goes_on_to_the_same_weights(finished, pairs, tmp_path):
    """On one device, after two replicas."""
    first = _start(tmp_path, pairs, "--strategy=mirrored", "--replicas=2")
    _wait_for_a_state(tmp_path, first)
    first.kill()
    first.wait()
    assert first.returncode == -signal.SIGKILL
    assert not (tmp_path / "t5").exists()
    again = _start(tmp_path, pairs)
    _, words = again.communicate()
    assert again.returncode == 0, words
    assert "going on after step" in words
    _assert_same(tmp_path / "t5", finished)


def test_replicas_that_cannot_share_a_batch_are_refused(pairs, strategy_of, tmp_path):
    devices = strategy.Devices(strategy_of(2))
    # A job that does more than this goes on with one device.
    config = _config(pairs, batch_size=5)
    assert pretrain.usable(config, devices) == strategy.Devices(notice=devices.notice)
    with pytest.raises(
        validation.InputError, match="batch_size is 5, which 2 replicas"
    ):
        pretrain.run(config, tmp_path / "t5", devices)
    assert not list(tmp_path.iterdir())


# -- Refused --------------------------------------------------------------------------


def test_unfinished_run_of_another_config_is_refused(pairs, tmp_path):
    state = tmp_path / ".t5.state"
    state.mkdir()
    (state / "run.json").write_text(json.dumps({"config": {}, "inputs": {}}))
    with pytest.raises(validation.InputError, match="unfinished run with another"):
        pretrain.run(_config(pairs), tmp_path / "t5")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps"),
        ({"steps": 10}, "steps is 10, no multiple of save_every, 4"),
        ({"optimizer": "adma"}, "optimizer"),
        ({"t5": {"vocabulary_size": 30000}}, "does not fit these texts"),
        ({"held_out_one_in": 10**9}, "0 rows of held_out"),
    ],
)
def test_bad_settings_are_refused(pairs, tmp_path, changes, message):
    with pytest.raises(validation.InputError, match=message):
        pretrain.run(_config(pairs, **changes), tmp_path / "t5")
    assert not (tmp_path / "t5").exists()


def test_private_weights_and_other_vocabularies_are_refused(pairs, finished, tmp_path):
    private = tmp_path / "private"
    tiny.write_private_generator(private, finished, 8.0)
    other = tmp_path / "other.model"
    lines = [f"w{i} x{i} y{i} z{i * 7} again and again" for i in range(300)]
    train_vocabulary(lines, 300, other)
    for changes, message in (
        ({"init": str(private)}, "trained on private queries"),
        ({"init": "t5_tiny_pydocs", "vocabulary": str(other)}, "another vocabulary"),
    ):
        config = _config(pairs, **changes)
        config.t5 = pretrain.default_config().t5  # the weights decide
        with pytest.raises(validation.InputError, match=message):
            pretrain.run(config, tmp_path / "t5")


def test_text_with_a_query_of_the_benchmark_is_refused(tmp_path, monkeypatch):
    small = build_pydocs(tmp_path / "cache", packages=["joblib"])
    monkeypatch.setattr(sources, "build_pydocs", lambda: small)
    query = next(iter(small.queries().values()))
    text = tmp_path / "text.jsonl"
    rows = [
        {"_id": "0", "text": "Nothing of the kind."},
        {"_id": "1", "text": f"Some words first.\n\n  {query.upper()}\n\nMore."},
    ]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(validation.DataError, match=r"text\.jsonl:2: .*holds the query"):
        pretrain.run(_config("pydocs", texts=(str(text),)), tmp_path / "t5")


def test_queries_and_bad_lines_are_no_public_text(pairs, tmp_path):
    config = _config(pairs, texts=(str(pairs / "queries.jsonl"),))
    with pytest.raises(validation.InputError, match="holds the queries of a BEIR"):
        pretrain.run(config, tmp_path / "t5")
    inside = tmp_path / "set" / "beir"
    inside.mkdir(parents=True)
    (tmp_path / "set" / "manifest.json").write_text("{}")
    (inside / "queries.jsonl").write_text('{"_id": "1", "text": "some"}\n')
    config = _config(pairs, texts=(str(inside / "queries.jsonl"),))
    with pytest.raises(validation.InputError, match="part of a synthetic set"):
        pretrain.run(config, tmp_path / "t5")
    text = tmp_path / "text.jsonl"
    text.write_text('{"_id": "1", "text": "some"}\n{"_id": "1", "text": 3}\n')
    with pytest.raises(validation.DataError, match=r"text\.jsonl:2: "):
        pretrain.run(_config(pairs, texts=(str(text),)), tmp_path / "t5")
    assert not (tmp_path / "t5").exists()


@pytest.mark.slow
def test_minute_of_training_lowers_the_held_out_losses(tmp_path):
    corpus = build_pydocs(tmp_path / "cache", packages=["numpy", "sklearn"])
    assert (corpus.path / PUBLIC_TEXT).is_file()
    config = _config(
        corpus.path,
        document_length=64,
        query_length=20,
        batch_size=32,
        held_out_one_in=16,
        held_out_rows=256,
        steps=320,
        save_every=20,
        warmup=30,
        learning_rate=2e-2,
    )
    config.t5.update(
        vocabulary_size=2100,
        num_layers=2,
        num_heads=2,
        hidden_dim=64,
        intermediate_dim=128,
        key_value_dim=32,
        dropout=0.0,
    )
    pretrain.run(config, tmp_path / "t5")
    record = json.loads((tmp_path / "t5" / pretrain.CURVE_FILE).read_text())
    first, last = record["held_out"][0], record["held_out"][-1]
    assert last["pseudo_queries"] < first["pseudo_queries"] - 0.2
    assert last["gap"] > max(0.03, first["gap"])
    # Of 32 rows: where all texts are one point, this is log 32 = 3.47.
    assert last["contrast"] < min(2.5, first["contrast"])
