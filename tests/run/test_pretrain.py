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

from tfdpsq import privacy
from tfdpsq.data import Tokenizer, build_pydocs
from tfdpsq.data.pydocs import PUBLIC_TEXT
from tfdpsq.generator import T5QueryGenerator, checkpoints
from tfdpsq.run import process
from tfdpsq.run.frame import runner, settings
from tfdpsq.run.frame.devices import Devices
from tfdpsq.run.frame.places import Place
from tfdpsq.run.stages import pretrain
from tfdpsq.validation import InputError

_SETTINGS = {
    "t5": {"vocabulary_size": 360, **tiny.SHAPE, "dropout": 0.2},
    "document_length": 40,
    "query_length": 16,
    "batch_size": 8,
    "held_out_one_in": 8,
    "steps": 10,
    "save_every": 4,
    "warmup": 2,
    "stored": "float32",
}


def _run(out, data, devices=None, **changes):
    given = {"data": str(data), **_SETTINGS, **changes}
    if "init" in given:
        del given["t5"]  # the weights decide
    made = settings.from_config(pretrain.STAGE.Settings, given)
    return runner.execute(pretrain.STAGE, made, Place.of(out), devices)


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
    assert _run(out, pairs)["guarantee"] == "public"
    return out


def test_result_loads_as_any_t5(finished):
    model = T5QueryGenerator.from_preset(finished)
    tokenizer = Tokenizer(checkpoints.vocabulary_in(finished))
    assert model.config.vocabulary_size == tokenizer.vocabulary_size == 360
    assert model.preprocessor.document_length == 40
    record = json.loads((finished / pretrain.CURVE_FILE).read_text())
    assert [epoch["step"] for epoch in record["curve"]] == [4, 8, 10]
    assert record["rows"]["held_out"] >= 2
    assert not list(finished.parent.rglob("backup"))  # nothing is left over


# -- Ended, and gone on with ----------------------------------------------------------


def _assert_same(out, finished):
    ours, theirs = (load_file(path / "model.safetensors") for path in (out, finished))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-4, atol=1e-5)
    curve, whole = (
        json.loads((path / pretrain.CURVE_FILE).read_text())["curve"]
        for path in (out, finished)
    )
    assert len(curve) == len(whole)
    for one, other in zip(curve, whole):
        # In the gap each replica has its own wrong documents.
        for what in set(other) - {"gap", "val_gap"}:
            assert one[what] == pytest.approx(other[what], abs=2e-3)


class _AskedAt(process.Notice):
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
    "before, after, step",
    [
        (1, 1, 5),
        pytest.param(2, 1, 5, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_preempted_run_goes_on_with_other_replicas_to_the_same_weights(
    pairs, finished, strategy_of, tmp_path, before, after, step
):
    """With dropout.

    Adafactor's steps are of the size that its statistics say: they are not the same
    where a share's gradient is taken for all.
    """
    out = tmp_path / "t5"
    devices = Devices(strategy_of(before), notice=_AskedAt(step))
    with pytest.raises(privacy.Preempted):
        _run(out, pairs, devices)
    assert not out.exists()
    _run(out, pairs, Devices(strategy_of(after)))
    _assert_same(out, finished)


@pytest.mark.slow
def test_killed_run_goes_on_to_the_same_weights(finished, pairs, tmp_path):
    """On one device, after two replicas."""
    flat = {**_SETTINGS, "data": pairs}
    flat.update({f"t5.{name}": value for name, value in flat.pop("t5").items()})
    out = tmp_path / "t5"
    command = killing.command("pretrain", out, flat, configured=False)
    place = {
        "cwd": killing.ROOT,
        "env": {**os.environ, "PYTHONPATH": ":".join(sys.path)},
    }
    first = forking.Command([*command, "--strategy=mirrored", "--replicas=2"], **place)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("private/runs/t5/backup/*/chief/checkpoint")):
        assert first.poll() is None, first.said()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.kill()
    first.wait()
    assert first.returncode == -signal.SIGKILL and not out.exists()
    again = forking.Command(command, **place)
    _, words = again.communicate()
    assert again.returncode == 0, words
    assert "going on after step" in words
    _assert_same(out, finished)


# -- Refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"t5": {"vocabulary_size": 30000}}, "does not fit these texts"),
        ({"held_out_one_in": 10**9}, "gives no rows of held_out"),
    ],
)
def test_bad_settings_are_refused(pairs, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        _run(tmp_path / "t5", pairs, **changes)
    assert not (tmp_path / "t5").exists()


def test_what_is_not_public_is_refused(pairs, finished, strategy_of, tmp_path):
    private = tmp_path / "made"
    tiny.write_private_generator(private, finished, 8.0)
    with pytest.raises(
        InputError, match="init is .*, which private queries had a part"
    ):
        _run(tmp_path / "t5", pairs, init=str(private))
    with pytest.raises(InputError, match="batch_size is 9, which 2 replicas"):
        _run(tmp_path / "t5", pairs, Devices(strategy_of(2)), batch_size=9)
    assert not (tmp_path / "t5").exists()


@pytest.mark.slow
def test_minute_of_training_lowers_the_held_out_losses(tmp_path):
    corpus = build_pydocs(tmp_path / "cache", packages=["numpy", "sklearn"])
    assert (corpus.path / PUBLIC_TEXT).is_file()
    shape = {"num_layers": 2, "num_heads": 2, "hidden_dim": 64}
    shape.update(vocabulary_size=2100, intermediate_dim=128, key_value_dim=32)
    _run(
        tmp_path / "t5",
        corpus.path,
        t5={**shape, "dropout": 0.0},
        document_length=64,
        query_length=20,
        batch_size=32,
        held_out_one_in=16,
        steps=320,
        save_every=20,
        warmup=30,
        learning_rate=2e-2,
    )
    record = json.loads((tmp_path / "t5" / pretrain.CURVE_FILE).read_text())
    first, last = record["curve"][0], record["curve"][-1]
    assert last["val_pseudo_queries"] < first["val_pseudo_queries"] - 0.2
    assert last["val_gap"] > max(0.03, first["val_gap"])
    # Of 32 rows: where all texts are one point, this is log 32 = 3.47.
    assert last["val_contrast"] < min(3.0, first["val_contrast"])
