"""`grid` chooses how to spend epsilon on public data and reads no private query."""

import json

import pytest
from helpers import tiny

from tfdpsq.data import BeirDirectory, train_vocabulary
from tfdpsq.privacy import read_certificate
from tfdpsq.run import grid
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    base = tmp_path_factory.mktemp("grid")
    tiny.write_pairs(base / "pairs", train=150, dev=5, test=5)
    texts = (d.content for d in BeirDirectory(base / "pairs").documents())
    train_vocabulary(texts, 320, base / "spiece.model")
    for path in (base / "pairs" / "queries.jsonl", *(base / "pairs/qrels").iterdir()):
        path.write_text("not to be read")
    made = grid.default_config()
    made.data = str(base / "pairs")
    made.finetune.update(
        vocabulary=str(base / "spiece.model"),
        document_length=24,
        query_length=10,
        epsilon=8.0,
        n_is_public=True,
        accountant="rdp",
        batch_size=8,
        steps=2,
        microbatch_size=8,
    )
    made.finetune.t5.update(tiny.SHAPE, vocabulary_size=320)
    made.variants = {
        "lora": {"lora": {"rank": 2, "targets": ("*/query_projector",)}},
        "norms": {"trained": ("*layer_norm*",)},
    }
    made.axes = (("learning_rate", (1e-2,)),)
    return made


@pytest.mark.slow
def test_every_point_is_trained_and_the_best_comes_first(config, tmp_path):
    rows = grid.run(config, tmp_path / "work")
    assert {row["settings"]["variant"] for row in rows} == {"lora", "norms"}
    losses = [row["own_loss"] for row in rows]
    assert losses == sorted(losses) and len(set(losses)) == 2
    assert json.loads((tmp_path / "work" / grid.RESULTS_FILE).read_text()) == rows
    for row in rows:
        certificate = read_certificate(tmp_path / "work" / "points" / row["name"])
        assert 7.5 < certificate["guarantee"]["epsilon"] <= 8.0


def test_unknown_setting_is_refused_before_anything_runs(config, tmp_path):
    changed = config.copy_and_resolve_references()
    changed.axes = (("learning_rat", (1.0,)),)
    with pytest.raises(InputError, match="'learning_rat' to 1.0"):
        grid.run(changed, tmp_path / "work")
    assert not (tmp_path / "work").exists()
