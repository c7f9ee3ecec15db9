"""Ordinary retriever training: where it starts, what it costs, its rows on disk."""

import math
import stat

import numpy as np
import pytest
from helpers import framed, tiny

from tfdpsq import retriever
from tfdpsq.data import read_manifest
from tfdpsq.privacy import read_certificate
from tfdpsq.run.common.kinds import MODEL
from tfdpsq.run.common.progress import Progress
from tfdpsq.run.frame import records
from tfdpsq.run.stages import train_retriever
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Pairs, public and private T5s of another shape than any default."""
    base = tmp_path_factory.mktemp("init")
    tiny.write_start(base, version="1.1", dropout=0.1)
    for name, epsilon in (("protected", 8.0), ("other", 4.0), ("open", math.inf)):
        tiny.write_private_generator(base / name, base / "public", epsilon)
    for name, certificate in (
        ("public_pairs", None),
        ("other_pairs", read_certificate(base / "other")),
    ):
        rows = ((f"who sorts it {i}", f"d{i}", f"It sorts {i}.") for i in range(12))
        tiny.write_set(base / name, rows, certificate)
    return base


def _settings(base, **options):
    usual = {"pairs": str(base / "public_pairs"), "embedding_dim": 16}
    usual.update({"batch_size": 4, "steps": 2, **options})
    made = tiny.training(base, **usual)
    return {name: value for name, value in made.items() if name != "accountant"}


def _made(out, **settings):
    """The retriever that the stage makes, and its certificate."""
    framed.run(train_retriever.STAGE, out, **settings)
    return retriever.load(out / MODEL), read_certificate(out)


def _train(base, name, **options):
    return _made(base / "private" / name, **_settings(base, **options))


# -- Where training starts ------------------------------------------------------------


def test_retriever_of_a_public_encoder_is_public(base):
    """`retriever/test_model` has the weights that it starts with."""
    _, certificate = _train(base, "start", steps=0)
    assert certificate is None
    stage = records.read_stage(base / "private" / "start")
    assert "init" in stage["depends"]["inputs"]
    assert stage["result"] == {"steps_executed": 0} and stage["guarantee"] == "public"


def test_retriever_goes_on_where_another_stopped_and_inherits_its_cost(base):
    """Its certificate, too, without which a finite epsilon would be too small."""
    before, cost = _train(base, "costly", init=str(base / "protected"), steps=0)
    assert cost == read_certificate(base / "protected")
    options = {"init": str(base / "private" / "costly"), "steps": 0}
    after, heir = _train(base, "heir", scale=5.0, **options)
    for one, other in zip(
        after.query_tower.get_weights(), before.query_tower.get_weights()
    ):
        np.testing.assert_array_equal(one, other)
    assert after.config.scale == 5.0 and heir == cost
    private = {"pairs": str(base / "pairs"), "method": "naive", "epsilon": 8.0}
    with pytest.raises(InputError, match="itself trained on private queries"):
        _train(base, "twice", **{**options, **private, "steps": 2})


def test_impossible_starts_are_refused(base):
    private = {"pairs": str(base / "pairs"), "n_is_public": False}
    for options, message in (
        ({"vocabulary": str(base / "spiece.model")}, "vocabulary is .* does nothing"),
        (
            {"epsilon": 8.0},
            "method is 'plain', which protects nobody, but epsilon is 8.0",
        ),
        ({"method": "naive"}, "has no private queries"),
        (private, "states their exact number"),
        ({"trained": ("*nothing_like_it",)}, "nothing_like_it"),
    ):
        with pytest.raises(InputError, match=message):
            _train(base, "refused", **options)
        assert not (base / "private" / "refused").exists()


# -- Its certificate ------------------------------------------------------------------


def test_certificates_of_weights_and_of_pairs_are_inherited(base):
    other = read_manifest(base / "other_pairs")["certificate"]
    pairs = str(base / "other_pairs")
    # The same guarantee twice, and one that is none.
    assert _train(base, "same", pairs=pairs, init=str(base / "other"))[1] == other
    _, none = _train(base, "none", pairs=pairs, init=str(base / "open"))
    assert none == read_certificate(base / "open") and none["private"] is False
    # What is not looked at costs nothing.
    untrained = _train(base, "zero", pairs=pairs, init=str(base / "protected"), steps=0)
    assert untrained[1] == read_certificate(base / "protected")
    with pytest.raises(InputError, match="which would add up"):
        _train(base, "two", pairs=pairs, init=str(base / "protected"))
    assert not (base / "private" / "two").exists()


def test_plain_training_on_private_pairs_protects_nothing_whatever_init(base):
    init = str(base / "protected")
    options = {"pairs": str(base / "pairs"), "split": "dev", "unit": "pair"}
    options.update(steps=0, epochs=1.0)
    _, certificate = _train(base, "plain", init=init, **options)
    assert certificate["private"] is False and certificate["spec"]["unit"] == "pair"
    # Epochs are of its own pairs: 12 of them in batches of 4.
    assert certificate["accounting"]["steps_executed"] == 3
    assert certificate["training"]["starting_weights"] == init


# -- Rows on disk ---------------------------------------------------------------------


def test_stopped_training_goes_on_from_its_backup(base, tmp_path, monkeypatch):
    """With the next batches and dropout, to the weights of one that never stopped.

    Rows on disk are the owner's alone, and are removed.
    """
    options = {"steps": 5, "save_every": 2, "validation_pairs": 2, "batch_size": 3}
    options["pairs"] = str(base / "pairs")  # 60, of which 2 are held out
    whole, _ = _train(base, "whole", **options)
    steps, call = [], Progress.__call__
    modes, store_pairs = [], retriever.store_pairs

    def watched(path, *arguments, **options):
        modes.append(stat.S_IMODE(path.stat().st_mode))
        above = path.relative_to(tmp_path).parts
        assert above[:3] == ("private", "runs", "out")
        return store_pairs(path, *arguments, **options)

    monkeypatch.setattr(retriever, "store_pairs", watched)

    def stops(self, step, loss):
        steps.append(step)
        if steps == [1, 2, 3]:
            raise KeyboardInterrupt
        call(self, step, loss)

    monkeypatch.setattr(Progress, "__call__", stops)
    settings = _settings(base, **options)
    out = tmp_path / "private" / "out"
    with pytest.raises(KeyboardInterrupt):
        _made(out, **settings)
    assert not out.exists()
    # Half of the rows, as they lie when it is killed while writing.
    (tmp_path / "private/runs/out/backup/rows/.pairs.x.partial").mkdir()
    resumed, _ = _made(out, **settings)
    assert steps == [1, 2, 3, 3, 4, 5]
    for one, other in zip(resumed.get_weights(), whole.get_weights()):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert modes == [0o700, 0o700]
    left = {path.name for path in tmp_path.rglob("*")}
    assert not left & {"rows", "rows.npy", "backup", "checkpoint"}
    reads = framed.reads(tmp_path / "private")
    assert any("hit rate" in read for read in reads)
    events = (base / "private" / "logs" / "whole").rglob("events.out.*")
    assert any(b"factorized_top_k/top_1_" in path.read_bytes() for path in events)


def test_batch_larger_than_the_set_is_refused(base):
    with pytest.raises(InputError, match="batch_size 14 is larger than the data"):
        _train(base, "large", batch_size=14)
    assert not (base / "private" / "large").exists()
