"""The text before a document: a setting of training, and the same when writing."""

import json

import numpy as np
import pytest
from helpers import tiny as _tiny

from tfdpsq.data import Tokenizer
from tfdpsq.run import finetune
from tfdpsq.run.attacks import audit_subject
from tfdpsq.run.core import sources
from tfdpsq.run.training import private_training
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("prompts")
    _tiny.write_start(base, vocabulary=300, train=8, dev=4, test=4)
    return base


def _config(base, **options):
    return _tiny.config(
        finetune, options, pairs=str(base / "pairs"), document_length=24, query_length=8
    )


def _rows(base, directory, **options):
    config = _config(base, **options)
    source = sources.load_source(config.pairs, config.split)
    tokenizer = Tokenizer(base / "spiece.model")
    encode = finetune._encoding(config, tokenizer)
    store = private_training.stored_rows(directory, source.read(), encode)
    return store.take(np.arange(8)), tokenizer, source.pairs


def test_the_prompt_stands_before_every_document_that_is_trained_on(base, tmp_path):
    """ "" is the bare document of the version of 2024."""
    bare, tokenizer, pairs = _rows(base, tmp_path / "bare", prompt="")
    alone, lengths = tokenizer.encode([pair.document for pair in pairs], 24)
    np.testing.assert_array_equal(bare["document_ids"], alone)
    np.testing.assert_array_equal(bare["document_lengths"], lengths)
    usual, _, _ = _rows(base, tmp_path / "usual")
    prompted = [f"generate_query: {pair.document}" for pair in pairs]
    np.testing.assert_array_equal(
        usual["document_ids"], tokenizer.encode(prompted, 24)[0]
    )
    np.testing.assert_array_equal(usual["query_ids"], bare["query_ids"])
    assert not np.array_equal(usual["document_ids"], bare["document_ids"])


def test_a_prompt_that_leaves_nothing_of_a_document_is_refused(base, tmp_path):
    """Before a step: the whole ε would be spent on queries of nothing."""
    _, (tokens,) = Tokenizer(base / "spiece.model").encode(["generate_query: "], 99)
    _rows(base, tmp_path / "one", document_length=int(tokens) + 1)
    message = (
        rf"document_length is {tokens} tokens, which the prompt 'generate_query: '"
    )
    with pytest.raises(InputError, match=message + ".* Raise document_length"):
        _rows(base, tmp_path / "none", document_length=int(tokens))
    assert not (tmp_path / "none").exists()


def test_another_prompt_than_the_trained_one_is_refused(base, tmp_path):
    generator = tmp_path / "generator"
    generator.symlink_to(base / "public", target_is_directory=True)
    with pytest.raises(InputError, match="prompt is 'x: '.*was trained with ''"):
        _require(tmp_path, {"prompt": ""}, "x: ")
    with pytest.raises(InputError, match="was trained with ''"):  # by `choose`
        _require(tmp_path, {"finetune": {"prompt": ""}}, "x: ")
    _require(tmp_path, {"prompt": "x: "}, "x: ")
    _require(tmp_path, {}, "x: ")  # of version 0.1.0, which had no such setting
    sources.require_prompt(
        "prompt", "x: ", generator
    )  # weights that nobody trained here


def _require(directory, config, prompt):
    (directory / "stage.json").write_text(json.dumps({**_tiny.STAGE, "config": config}))
    sources.require_prompt("prompt", prompt, directory)


def test_an_audit_scores_with_the_prompt_of_the_training(base):
    assert audit_subject.prompt_of(_config(base, prompt="")) == ""
    older = _config(base)
    with older.unlocked():
        del older["prompt"]
    assert audit_subject.prompt_of(older) == "generate_query: "
