"""Choosing how to spend ε on public data: what is read, what is tried, what is told."""

import json
import shutil

import pytest
from helpers import tiny as _tiny
from helpers import tiny_grid

from tfdpsq import validation
from tfdpsq.data import BeirDirectory, Document, keyword_pairs, train_vocabulary
from tfdpsq.data.pydocs import split_of
from tfdpsq.privacy import read_certificate
from tfdpsq.run import grid
from tfdpsq.run.training import grid_points


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("grid")
    _tiny.write_pairs(directory / "pairs", train=150, dev=5, test=5)
    texts = (d.content for d in BeirDirectory(directory / "pairs").documents())
    train_vocabulary(texts, 320, directory / "spiece.model")
    return directory


def _config(base, **changes):
    config = grid.default_config()
    config.data = str(base / "pairs")
    tiny_grid.in_common(config.finetune, base, steps=2)
    config.variants = {
        "lora": {"lora": {"rank": 2, "targets": ("*/query_projector",)}},
        "norms": {"trained": ("*layer_norm*",)},
    }
    config.axes = (("learning_rate", (1e-2,)),)
    for field, value in changes.items():
        config[field] = value
    return config


@pytest.fixture(scope="module")
def finished(base):
    return grid.run(_config(base), base / "work")


def test_every_point_is_run_and_the_best_comes_first(finished, base):
    assert {
        (row["settings"]["variant"], row["settings"]["learning_rate"])
        for row in finished
    } == {("lora", 1e-2), ("norms", 1e-2)}
    assert len(finished) == 2
    losses = [row["own_loss"] for row in finished]
    assert losses == sorted(losses) and 0 < losses[0] < 10
    assert len(set(losses)) == 2
    assert json.loads((base / "work" / grid.RESULTS_FILE).read_text()) == finished


def test_every_variant_is_combined_with_every_value_of_every_axis(base):
    axes = (("learning_rate", (1e-3, 1e-2)), ("steps", (2, 3, 4)))
    points = list(grid_points.points_of(_config(base, axes=axes), "finetune"))
    assert len({point.name for point in points}) == len(points) == 2 * 2 * 3
    found = set()
    for point in points:
        settings, stage = point.settings, point.stage
        assert stage.learning_rate == settings["learning_rate"]
        assert stage.steps == settings["steps"]
        assert stage.lora.rank == (2 if settings["variant"] == "lora" else 0)
        found.add((settings["variant"], stage.learning_rate, stage.steps))
    assert len(found) == len(points)


def test_each_point_spent_what_was_meant_on_the_weights_that_were_meant(finished, base):
    for row in finished:
        certificate = read_certificate(base / "work" / "points" / row["name"])
        assert 7.5 < certificate["guarantee"]["epsilon"] <= 8.0
        training = certificate["training"]
        assert training["learning_rate"] == row["settings"]["learning_rate"]
        if row["settings"]["variant"] == "norms":
            assert training["trained"] == ["*layer_norm*"]
            # 2 norms in an encoder layer, 3 in a decoder layer, one after each stack.
            assert row["trained_parameters"] == 16 * (2 + 3 + 2)
        else:
            assert training["lora"]["rank"] == 2
            # Query projectors: encoder, decoder, cross; A and B of rank 2 each.
            assert row["trained_parameters"] == 3 * 2 * (16 + 16)


def test_no_private_query_is_read(finished, base, tmp_path):
    other = tmp_path / "pairs"
    _tiny.write_pairs(other, train=150, dev=5, test=5)
    lines = (other / "queries.jsonl").read_text().splitlines()
    changed = [json.dumps({**json.loads(line), "text": "zebra"}) for line in lines]
    (other / "queries.jsonl").write_text("\n".join(changed) + "\n")
    config = _config(base, data=str(other), variants={}, axes=())
    grid.run(config, tmp_path / "work")
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/train.tsv", "qrels/dev.tsv"):
        ours = base / "work" / "proxy" / "pairs" / name
        assert ours.read_bytes() == (tmp_path / "work/proxy/pairs" / name).read_bytes()


def test_points_are_compared_on_the_same_held_out_queries(finished, base, tmp_path):
    """Another `held_out` measures all points again, without training them."""
    work = tmp_path / "work"
    shutil.copytree(base / "work", work)
    fewer = grid.run(_config(base, held_out=2), work)
    assert {row["held_out"] for row in fewer} == {2}
    assert {row["name"]: row["seconds"] for row in fewer} == {
        row["name"]: row["seconds"] for row in finished
    }
    losses = {row["name"]: row["own_loss"] for row in finished}
    assert all(row["own_loss"] != losses[row["name"]] for row in fewer)
    assert grid.run(_config(base), work) == finished


def test_a_grid_has_no_users(base, tmp_path):
    config = _config(base, axes=(("unit", ("query", "user")),))
    with pytest.raises(validation.InputError, match="unit is 'user', but the grid's"):
        grid.run(config, tmp_path / "work")


def test_a_finished_grid_is_not_redone(finished, base):
    stages = list((base / "work" / "points").glob("*/stage.json"))
    before = {path: path.read_bytes() for path in stages}
    assert len(before) == 2
    assert grid.run(_config(base), base / "work") == finished
    assert {path: path.read_bytes() for path in stages} == before


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"axes": (("learning_rat", (1.0,)),)}, "'learning_rat' to 1.0"),
        ({"axes": (("lora.rang", (1,)),)}, "'lora.rang' to 1"),
        ({"axes": (("learning_rate", ("high",)),)}, "'learning_rate' to 'high'"),
    ],
)
def test_a_setting_that_is_none_is_refused_before_anything_runs(
    base, tmp_path, changes, message
):
    with pytest.raises(validation.InputError, match=message):
        grid.run(_config(base, **changes), tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("stage", grid_points.STAGES)
def test_a_single_held_out_query_is_refused_before_a_point_is_trained(
    base, tmp_path, stage
):
    """A loss is compared with that of another document: there was none to take."""
    message = "held_out is 1; it must be .* at least 2. Points are compared on quer"
    with pytest.raises(validation.InputError, match=message):
        grid.run(_config(base, held_out=1, stage=stage), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_documents_that_hold_out_one_query_are_refused_before_a_point_is_trained(
    base, tmp_path, monkeypatch
):
    found = keyword_pairs(BeirDirectory(base / "pairs").documents, 0)
    held = [pair.document_id for pair in found if split_of(pair.document_id) == "dev"]
    assert len(held) > 1
    monkeypatch.setattr(
        grid, "split_of", lambda name: "dev" if name == held[0] else "train"
    )
    message = "held_out is 512, but .* gives 1 keyword queries to hold out"
    with pytest.raises(validation.InputError, match=message):
        grid.run(_config(base), tmp_path / "work")
    assert not (tmp_path / "work" / "points").exists()


@pytest.mark.slow
def test_a_retrievers_points_are_ranked_by_where_it_ranks(base, tmp_path):
    config = _config(base, stage="train_retriever", axes=())
    stage = config.train_retriever
    for field in ("vocabulary", "document_length", "query_length", "epsilon"):
        stage[field] = config.finetune[field]
    stage.t5.update(config.finetune.t5)
    config.finetune = grid.default_config().finetune
    stage.update(method="public_negatives", n_is_public=True, accountant="rdp")
    stage.update(embedding_dim=16, batch_size=8, negatives=8, steps=2)
    config.variants = {"fast": {"learning_rate": 1e-2}, "untrained": {"steps": 0}}
    found = grid.run(config, tmp_path / "work")
    assert {row["settings"]["variant"] for row in found} == {"fast", "untrained"}
    assert found[0]["ndcg@10"] >= found[1]["ndcg@10"] > 0
    parameters = {r["settings"]["variant"]: r["trained_parameters"] for r in found}
    assert parameters["untrained"] is None and parameters["fast"] > 320 * 16
    other = _config(base, stage="train_retriever")
    other.finetune = grid.default_config().finetune
    with pytest.raises(validation.InputError, match="which train_retriever does not"):
        grid.run(other, tmp_path / "other")
    with pytest.raises(validation.InputError, match="stage is 'synthesize'"):
        grid.run(_config(base, stage="synthesize"), tmp_path / "other")


def test_keywords_are_the_rarest_words_of_a_sentence_in_their_order():
    common = "the of a is here and then so on".split()
    documents = [
        Document(
            f"d{i}",
            "",
            "The Zebra crosses the wide River and then is here. " + "So on. " * 12,
        )
        if i == 0
        else Document(f"d{i}", "", " ".join(common) + ". " + "So on and on. " * 12)
        for i in range(20)
    ]
    pairs = {p.document_id: p for p in keyword_pairs(lambda: documents, 0, 4)}
    assert pairs["d0"].query == "zebra crosses wide river"
    assert "Zebra" not in pairs["d0"].document


def test_keywords_need_a_positive_number():
    with pytest.raises(validation.InputError, match="most_words"):
        list(keyword_pairs(lambda: [], 0, 0))
