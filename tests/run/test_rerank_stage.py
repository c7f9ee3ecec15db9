"""Stage `rerank`: the model that it exports scores as `evaluate` measured."""

import math
import shutil

import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq.data import BeirDirectory
from tfdpsq.generator import QueryLikelihood, T5QueryGenerator
from tfdpsq.privacy import read_certificate
from tfdpsq.run import rerank
from tfdpsq.run.core import spending
from tfdpsq.validation import DataError, InputError


def _config(start, **changes):
    return _tiny.config(rerank, changes, generator=str(start / "generator"))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Pairs, a generator with a certificate, and the reranker exported of it."""
    start = tmp_path_factory.mktemp("rerank")
    _tiny.write_start(start)
    _tiny.write_private_generator(start / "generator", start / "public", 8.0)
    rerank.run(_config(start), start / "made")
    return start


def test_exported_reranker_scores_as_evaluate_does(start):
    pairs = BeirDirectory(start / "pairs").pairs("test")
    model = T5QueryGenerator.from_preset(start / "generator")
    texts = [(pair.document, pair.query) for pair in pairs]
    expected = list(QueryLikelihood(model).scores(texts))
    score = tf.saved_model.load(str(start / "made" / "reranker")).signatures["score"]
    documents, queries = (tf.constant(each) for each in zip(*texts))
    found = score(queries=queries, documents=documents)["nats"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_reranker_is_as_private_as_its_generator(start, tmp_path):
    """It holds all weights; `--budget` took a copy of it for nothing."""
    unprotected = tmp_path / "private" / "generator"
    _tiny.write_private_generator(unprotected, start / "public", math.inf)
    config = _config(start, generator=str(unprotected))
    with pytest.raises(InputError, match="must stay private"):
        rerank.run(config, tmp_path / "job" / "release" / "reranker")
    certificate = read_certificate(start / "generator")
    assert read_certificate(start / "made") == certificate
    copy = tmp_path / "other" / "release" / "copy"
    shutil.copytree(start / "made" / "reranker", copy)
    found = spending.find_certificates(str(tmp_path / "other"))
    assert list(found.refused) == [str(copy / "certificate.json")]
    with pytest.raises(DataError, match="missing"):
        read_certificate(copy)
    shutil.copy(start / "made" / "certificate.json", copy)
    assert read_certificate(copy) == certificate
