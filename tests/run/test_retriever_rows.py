"""Pairs of plain retriever training lie on disk: the same training, nothing left."""

import pathlib
import shutil
import stat

import numpy as np
import pytest
from helpers import tiny

from tfdpsq import retriever
from tfdpsq.data import (
    Document,
    Tokenizer,
    train_vocabulary,
    write_beir,
)
from tfdpsq.run import train_retriever
from tfdpsq.run.core import sources
from tfdpsq.run.training import plain_training
from tfdpsq.validation import DataError, InputError

_WORDS = "array list matrix tensor string file image graph table index sort".split()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The same pairs as private ones and as a set."""
    base = tmp_path_factory.mktemp("rows")
    draw = np.random.default_rng(0)
    texts = [f"{' '.join(draw.choice(_WORDS, 8))} {i}" for i in range(13)]
    queries = [" ".join(draw.choice(text.split(), 3)) for text in texts]
    write_beir(
        base / "pairs",
        [Document(f"d{i}", "", text) for i, text in enumerate(texts)],
        [(f"q{i}", query) for i, query in enumerate(queries)],
        {"train": [(f"q{i}", f"d{i}", 1) for i in range(13)]},
    )
    ids = (f"d{i}" for i in range(13))
    tiny.write_set(base / "set", zip(queries, ids, texts))
    train_vocabulary(texts * 9, 290, base / "spiece.model")
    return base


def _config(base, pairs, **options):
    return tiny.config(
        train_retriever,
        options,
        t5={**tiny.SHAPE, "vocabulary_size": 330},
        pairs=str(base / pairs),
        vocabulary=str(base / "spiece.model"),
        document_length=12,
        query_length=6,
        embedding_dim=16,
        batch_size=4,
        steps=4,
        n_is_public=True,
    )


def _rows_directory(base, pairs):
    """Where a stage called `out` has its rows while it trains."""
    if pairs == "pairs":
        return base / "private" / "runs" / "out" / "rows"
    (partial,) = base.glob(".out.*.partial")
    return partial / "rows"


@pytest.mark.parametrize("pairs, stays", [("pairs", False), ("set", True)])
def test_steps_are_taken_on_the_batches_of_memory(
    base, tmp_path, monkeypatch, pairs, stays
):
    """Bit by bit, two epochs; rows are the owner's alone, and gone at the end."""
    options = dict(shared=False, trained=("query_tower/*",)) if stays else {}
    config = _config(base, pairs, **options)
    models, modes, files, taken = [], [], set(), []
    make_step = plain_training.make_step

    def watched(model, *arguments):
        path = _rows_directory(tmp_path, pairs)
        models.append(model)
        modes.append(stat.S_IMODE(path.stat().st_mode))
        files.update(p.relative_to(path).as_posix() for p in path.rglob("*.bin"))
        step = make_step(model, *arguments)
        return lambda batch: taken.append(batch) or step(batch)

    monkeypatch.setattr(plain_training, "make_step", watched)
    monkeypatch.setattr(retriever, "save", lambda *_: None)  # slow, and not looked at
    train_retriever.run(config, tmp_path / "out")
    assert modes == [0o700]
    documents = {"documents/rows-00000.bin"} if stays else set()
    assert files == {"pairs/rows-00000.bin"} | documents
    left = [path.name for path in tmp_path.rglob("*")]
    assert "rows" not in left and not any(name.endswith(".bin") for name in left)
    expected = retriever.make_batches(
        sources.load_source(config.pairs).pairs,
        Tokenizer(base / "spiece.model"),
        config.batch_size,
        query_length=config.query_length,
        document_length=config.document_length,
        seed=config.seed,
        model=models[0] if stays else None,  # its document tower is as it was
    )
    assert len(taken) == 4
    for found in taken:
        wanted = next(expected)
        assert wanted.keys() == found.keys()
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name], values, strict=True)


def test_a_killed_training_leaves_rows_that_the_next_removes(
    base, tmp_path, monkeypatch
):
    """Also half of them, as they lie when it is killed while writing."""

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plain_training, "make_step", killed)
    with monkeypatch.context() as patch:
        # A process that is killed removes nothing; one that fails does.
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            train_retriever.run(_config(base, "pairs"), tmp_path / "out")
    rows = _rows_directory(tmp_path, "pairs")
    assert (rows / "pairs" / "rows-00000.bin").is_file()
    (rows / ".pairs.x.partial").mkdir()
    # Also by a run of another kind into the same directory, which makes no rows.
    train_retriever.run(_config(base, "pairs", steps=0), tmp_path / "out")
    assert not rows.exists()
    shutil.rmtree(tmp_path / "out")
    rows.mkdir()
    with pytest.raises(KeyboardInterrupt):
        train_retriever.run(_config(base, "pairs"), tmp_path / "out")
    assert not rows.exists() and not (tmp_path / "out").exists()


def test_a_source_is_streamed_and_checked(base, tmp_path):
    """A set's pairs are not held, and not given out where a file was altered."""
    source = sources.load_source(str(base / "set"))
    assert source.count == 13 and not source.private
    stream = source.read()
    assert next(stream).query_id == "genQ0"
    assert [pair.query_id for pair in source.read()] == [f"genQ{i}" for i in range(13)]
    assert source.pairs == list(source.read()) and source.pairs is source.pairs
    private = sources.load_source(str(base / "pairs"))
    assert private.count == 13 and private.private and len(private.pairs) == 13
    shutil.copytree(base / "set", tmp_path / "set")
    (file,) = pathlib.Path(tmp_path / "set" / "records").iterdir()
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    with pytest.raises(DataError, match="was altered or damaged"):
        train_retriever.run(_config(base, tmp_path / "set"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_batch_larger_than_the_set_is_refused_before_anything_is_written(
    base, tmp_path, monkeypatch
):
    """By the count of its manifest alone."""
    monkeypatch.setattr(retriever, "store_pairs", lambda *_: pytest.fail("written"))
    with pytest.raises(InputError, match="batch_size is 14 but there are 13 pairs"):
        train_retriever.run(_config(base, "set", batch_size=14), tmp_path / "out")
