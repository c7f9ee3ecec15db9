"""Stage `rerank`: what it exports is as private as its generator.

`generator/test_likelihood` has the exported model's scores.
"""

import math
import shutil

import pytest
from helpers import framed
from helpers import tiny as _tiny

from tfdpsq.privacy import read_certificate
from tfdpsq.run.stages.rerank import STAGE
from tfdpsq.validation import DataError, InputError


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Pairs, a generator with a certificate, and the reranker exported of it."""
    start = tmp_path_factory.mktemp("rerank")
    _tiny.write_start(start)
    shutil.copytree(start / "public", start / "generator")
    framed.certify(start / "generator", 8.0)
    framed.run(STAGE, start / "made", generator=str(start / "generator"))
    return start


def test_reranker_is_as_private_as_its_generator(start, tmp_path):
    """It holds all weights: a copy without the certificate is known as derived."""
    unprotected = tmp_path / "private" / "generator"
    shutil.copytree(start / "public", unprotected)
    framed.certify(unprotected, math.inf)
    with pytest.raises(InputError, match="under release/, but what rerank makes"):
        framed.run(
            STAGE, tmp_path / "job" / "release" / "out", generator=str(unprotected)
        )
    certificate = read_certificate(start / "generator")
    assert read_certificate(start / "made") == certificate
    copy = tmp_path / "copy"
    shutil.copytree(start / "made" / "reranker", copy)
    with pytest.raises(DataError, match="missing"):
        read_certificate(copy)
    shutil.copy(start / "made" / "certificate.json", copy)
    assert read_certificate(copy) == certificate


def test_a_generator_without_a_vocabulary_is_refused(start, tmp_path):
    shutil.copytree(start / "public", tmp_path / "bare")
    (tmp_path / "bare" / "spiece.model").unlink()
    with pytest.raises(InputError, match="generator is .*bare, which has no spiece"):
        framed.run(STAGE, tmp_path / "out", generator=str(tmp_path / "bare"))
