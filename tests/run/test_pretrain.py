"""Public pretraining as its users run it: it learns, is killed, goes on, refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers import killing as _killing
from helpers import plans
from helpers import tiny as _tiny
from safetensors.numpy import load_file

from tfdpsq import validation
from tfdpsq.data import Tokenizer, build_pydocs, train_vocabulary
from tfdpsq.data.pydocs import PUBLIC_TEXT
from tfdpsq.generator import T5QueryGenerator
from tfdpsq.run import pretrain
from tfdpsq.run.core import sources

_T5 = {
    "vocabulary_size": 460,
    **_tiny.SHAPE,
    "dropout": 0.2,
}


def _config(data, **changes):
    config = pretrain.default_config()
    config.data = str(data)
    config.t5.update(_T5)
    config.update(
        {
            "document_length": 40,
            "query_length": 16,
            "pair_rows": 6,
            "text_rows": 3,
            "held_out_one_in": 8,
            "steps": 12,
            "watch_every": 6,
            "save_every": 4,
            "warmup": 2,
            "stored": "float32",
            **changes,
        }
    )
    return config


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "pairs"
    _tiny.write_pairs(directory, train=150, dev=5, test=5)
    return directory


@pytest.fixture(scope="module")
def finished(pairs, tmp_path_factory):
    """A run that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "t5"
    pretrain.run(_config(pairs), out)
    return out


def test_what_is_written_loads_as_any_t5(finished):
    model = T5QueryGenerator.from_preset(finished)
    tokenizer = Tokenizer(sources.vocabulary_file("", str(finished)))
    assert model.config.vocabulary_size == 460
    assert tokenizer.vocabulary_size == 360  # the other hundred are sentinels
    record = json.loads((finished / pretrain.CURVE_FILE).read_text())
    assert record["steps"] == [6, 12]
    assert set(record["watched"][0]) == {
        "token_cosine",
        "document_cosine",
        "own_loss",
        "wrong_loss",
        "gap",
        "first",
    }
    assert record["rows"]["held_out"] >= 2
    assert not list(finished.parent.glob(".*state*"))  # nothing is left over


def test_in_bfloat16_weights_keep_their_last_digits(finished, pairs, tmp_path):
    pretrain.run(_config(pairs, dtype="mixed_bfloat16"), tmp_path / "t5")
    exact, low = (
        np.concatenate([stored[name].ravel() for name in sorted(stored)])
        for stored in (
            load_file(path / "model.safetensors")
            for path in (finished, tmp_path / "t5")
        )
    )
    assert low.dtype == np.float32
    assert np.mean(low != tf.cast(tf.cast(low, tf.bfloat16), tf.float32)) > 0.9
    # The same batches, with products that are rounded.
    assert np.mean(exact != low) > 0.5
    assert np.corrcoef(exact, low)[0, 1] > 0.99


def test_no_query_is_read(finished, pairs, tmp_path):
    # The same documents under other queries: the same bytes.
    other = tmp_path / "pairs"
    _tiny.write_pairs(other, train=150, dev=5, test=5)
    lines = (other / "queries.jsonl").read_text().splitlines()
    changed = [json.dumps({**json.loads(line), "text": "zebra"}) for line in lines]
    (other / "queries.jsonl").write_text("\n".join(changed) + "\n")
    pretrain.run(_config(other), tmp_path / "t5")
    _assert_same_weights(finished, tmp_path / "t5")
    assert _file(finished, "spiece.model") == _file(tmp_path / "t5", "spiece.model")


def _start(base, pairs, *flags, environment=None):
    """The stage in a process of its own, into base/t5."""
    config = base / "config.py"
    config.write_text(
        "import runpy\n"
        "def get_config():\n"
        f"    return runpy.run_path({str(__file__)!r})['_config']({str(pairs)!r})\n"
    )
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdpsq.run.pretrain",
            f"--config={config}",
            f"--workdir={base / 't5'}",
            *flags,
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **(environment or {}),
        },
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_a_state(base, child):
    state = base / ".t5.state" / "weights" / "checkpoint"
    deadline = time.monotonic() + 300
    while not state.is_file():
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _assert_same(base, finished):
    _assert_same_weights(finished, base / "t5")
    curve, whole = (
        json.loads((path / pretrain.CURVE_FILE).read_text())
        for path in (base / "t5", finished)
    )
    assert curve["steps"] == whole["steps"]
    for name in ("watched", "losses"):
        for ours, theirs in zip(curve[name], whole[name]):
            for what in set(theirs) - {"first"}:  # of near documents any may be
                assert ours[what] == pytest.approx(theirs[what], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent, status, flags",
    [
        (signal.SIGKILL, -signal.SIGKILL, ["--strategy=mirrored", "--replicas=3"]),
        (signal.SIGTERM, 75, []),
        (signal.SIGTERM, 75, ["--strategy=mirrored", "--replicas=3"]),
    ],
)
def test_ended_it_goes_on_to_the_same_weights(
    finished, pairs, tmp_path, sent, status, flags
):
    """On one device, whatever it ran on before."""
    first = _start(tmp_path, pairs, *flags)
    _wait_for_a_state(tmp_path, first)
    first.send_signal(sent)
    _, words = first.communicate()
    assert first.returncode == status, words
    assert not (tmp_path / "t5").exists()
    again = _start(tmp_path, pairs)
    _, words = again.communicate()
    assert again.returncode == 0, words
    assert "going on after step" in words
    _assert_same(tmp_path, finished)


@pytest.mark.slow
def test_workers_train_what_one_process_does(finished, pairs, tmp_path):
    """Three of them, of which one is asked to end; all do, and go on together."""
    pairs_before = sorted(pairs.rglob("*"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def workers():
        return [
            _start(
                tmp_path,
                pairs,
                "--strategy=multiworker",
                environment={**environment, "TMPDIR": str(scratch)},
            )
            for environment in _killing.cluster(3)
        ]

    def ended(children):
        try:
            return [child.communicate(timeout=240)[1] for child in children]
        finally:
            for child in children:
                child.kill()

    children = workers()
    _wait_for_a_state(tmp_path, children[0])
    children[2].send_signal(signal.SIGTERM)
    words = ended(children)
    assert [child.returncode for child in children] == [75] * 3, words
    assert not (tmp_path / "t5").exists()
    children = workers()
    words = ended(children)
    assert [child.returncode for child in children] == [0] * 3, words
    assert "going on after step" in words[0]
    _assert_same(tmp_path, finished)
    # The chief alone has written, and nothing is left over.
    assert list(scratch.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.py",
        "private",
        "scratch",
        "t5",
    }
    assert sorted(pairs.rglob("*")) == pairs_before


def test_an_unfinished_run_of_another_config_is_not_gone_on_with(pairs, tmp_path):
    state = tmp_path / ".t5.state"
    state.mkdir()
    (state / "run.json").write_text(json.dumps({"config": {}, "inputs": {}}))
    with pytest.raises(validation.InputError, match="unfinished run with another"):
        pretrain.run(_config(pairs), tmp_path / "t5")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps"),
        ({"pair_rows": 0}, "pair_rows"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"stored": "int8"}, "stored"),
        ({"optimizer": "adma"}, "optimizer"),
        ({"contrast_weight": -1.0}, "contrast_weight"),
        ({"t5": {"vocabulary_size": 90}}, "t5.vocabulary_size is 90; 100 of it"),
        (
            {"t5": {"vocabulary_size": 30000}},
            "t5.vocabulary_size is 30000, but these texts give at most",
        ),
        ({"held_out_one_in": 10**9}, "0 rows of held_out"),
    ],
)
def test_bad_settings_are_refused(pairs, tmp_path, changes, message):
    config = _config(pairs)
    config.update(changes)
    with pytest.raises(validation.InputError, match=message):
        pretrain.run(config, tmp_path / "t5")
    assert not (tmp_path / "t5").exists()


def test_weights_that_saw_private_queries_are_not_public(pairs, finished, tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    for file in finished.iterdir():
        (private / file.name).write_bytes(file.read_bytes())
    plan = plans.plan(epsilon=8.0, num_units=100, batch_size=10, steps=2)
    certificate = plans.certificate(plan)
    (private / "certificate.json").write_text(json.dumps(certificate))
    config = _config(pairs, init=str(private))
    config.t5 = pretrain.default_config().t5  # the weights decide
    with pytest.raises(validation.InputError, match="trained on private queries"):
        pretrain.run(config, tmp_path / "t5")


def test_another_vocabulary_than_the_weights_own_is_refused(pairs, tmp_path):
    other = tmp_path / "other.model"
    lines = [f"w{i} x{i} y{i} z{i * 7} again and again" for i in range(300)]
    train_vocabulary(lines, 300, other)
    config = _config(pairs, init="t5_tiny_pydocs", vocabulary=str(other))
    config.t5 = pretrain.default_config().t5
    with pytest.raises(
        validation.InputError, match="t5_tiny_pydocs was trained with another"
    ):
        pretrain.run(config, tmp_path / "t5")
    assert not (tmp_path / "t5").exists()


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
    where = r"text\.jsonl:2: .*holds the query"
    with pytest.raises(validation.DataError, match=where):
        pretrain.run(_config("pydocs", texts=(str(text),)), tmp_path / "t5")


def test_a_size_needs_a_t5_to_be_made_from(pairs, tmp_path):
    config = _config(pairs)
    config.resize.num_layers = 4
    with pytest.raises(
        validation.InputError, match="resize.num_layers is 4, .* acts only where init"
    ):
        pretrain.run(config, tmp_path / "t5")


def test_queries_and_synthetic_sets_are_no_public_text(pairs, tmp_path):
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
    assert not (tmp_path / "t5").exists()


def test_a_manifest_of_another_program_makes_no_set(pairs, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "manifest.json").write_text('{"name": "a page", "icons": []}')
    (site / "text.jsonl").write_text('{"_id": "1", "text": 3}\n')
    config = _config(pairs, texts=(str(site / "text.jsonl"),))
    with pytest.raises(validation.DataError, match=r"text\.jsonl:1: "):
        pretrain.run(config, tmp_path / "t5")
    logs = shutil.copytree(pairs, tmp_path / "logs")
    (logs / "manifest.json").write_text('{"name": "a page", "icons": []}')
    assert sources.load_source(str(logs)).private
    # Nor does one above them, as a table's export writes it.
    (tmp_path / "manifest.json").write_text('{"entries": [], "schema": {}}')
    assert sources.load_source(str(logs)).private
    with pytest.raises(validation.DataError, match=r"text\.jsonl:1: "):
        pretrain.run(config, tmp_path / "t5")


@pytest.mark.parametrize("line", ["{", '{"text": "no id"}', '{"_id": "1", "text": 3}'])
def test_bad_text_is_named_by_file_and_line(pairs, tmp_path, line):
    text = tmp_path / "text.jsonl"
    text.write_text('{"_id": "1", "text": "some"}\n' + line + "\n")
    with pytest.raises(validation.DataError, match=r"text\.jsonl:2: "):
        pretrain.run(_config(pairs, texts=(str(text),)), tmp_path / "t5")


@pytest.mark.slow
def test_a_minute_of_it_moves_what_is_watched_the_right_way(tmp_path):
    corpus = build_pydocs(tmp_path / "cache", packages=["numpy", "sklearn"])
    assert (corpus.path / PUBLIC_TEXT).is_file()
    config = _config(
        corpus.path,
        document_length=64,
        query_length=20,
        pair_rows=24,
        text_rows=8,
        held_out_one_in=16,
        watched_rows=256,
        steps=320,
        watch_every=20,
        save_every=1000,
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
    first, last = record["watched"][0], record["watched"][-1]
    assert last["own_loss"] < first["own_loss"] - 0.2
    assert last["gap"] > max(0.03, first["gap"])
    assert last["first"] > first["first"]
    assert last["token_cosine"] < 0.5
    assert last["document_cosine"] < first["document_cosine"] - 0.03


def _assert_same_weights(first, second):
    ours, theirs = (load_file(path / "model.safetensors") for path in (first, second))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-4, atol=1e-5)


def _file(directory, name):
    return (directory / name).read_bytes()
