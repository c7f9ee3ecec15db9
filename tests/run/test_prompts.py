"""The text before a document, a setting of training."""

import numpy as np
import pytest
from helpers import tiny as _tiny

from tfdpsq.data import Tokenizer
from tfdpsq.generator import Preprocessor
from tfdpsq.run import finetune
from tfdpsq.run.core import sources
from tfdpsq.validation import InputError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("prompts")
    _tiny.write_start(base, vocabulary=300, train=8, dev=4, test=4)
    return base


def test_the_prompt_stands_before_every_document(base):
    """And "" is the bare document, as in the version of 2024."""
    tokenizer = Tokenizer(base / "spiece.model")
    pairs = list(sources.load_source(str(base / "pairs"), "train").pairs)
    lengths = {"document_length": 24, "query_length": 8}
    bare = Preprocessor(tokenizer, "", **lengths).arrays(pairs)
    usual = Preprocessor(tokenizer, **lengths).arrays(pairs)
    for prompt, found in (("", bare), ("generate_query: ", usual)):
        texts = [prompt + pair.document for pair in pairs]
        ids, sizes = tokenizer.encode(texts, 24)
        np.testing.assert_array_equal(found["document_ids"], ids)
        np.testing.assert_array_equal(found["document_lengths"], sizes)
    np.testing.assert_array_equal(usual["query_ids"], bare["query_ids"])


def test_a_prompt_that_leaves_nothing_of_a_document_is_refused(base, tmp_path):
    """Before a step: the whole ε would be spent on queries of nothing."""
    _, (tokens,) = Tokenizer(base / "spiece.model").encode(["generate_query: "], 99)
    settings = _tiny.training(base, document_length=int(tokens), epsilon=8.0, steps=1)
    with pytest.raises(InputError, match=f"document_length is {tokens}.*prompt"):
        finetune.run(_tiny.config(finetune, settings), tmp_path / "release" / "out")
    assert not list(tmp_path.rglob("ledger.jsonl"))
