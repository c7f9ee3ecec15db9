"""Training the retriever directly, killed with SIGKILL, to the same weights."""

import json
import shutil

import numpy as np
import pytest
from helpers import killing as _killing
from helpers import tiny as _tiny

from tfdpsq import retriever
from tfdpsq.data import train_vocabulary
from tfdpsq.run.core import layout

_STEPS = 20
_SETTINGS = {
    "t5.vocabulary_size": 320,
    **_tiny.FLAGS,
    "t5.dropout": 0.2,
    "embedding_dim": 16,
    "document_length": 24,
    "query_length": 10,
    "method": "public_negatives",
    "negatives": 12,
    # So that a step after a kill may need what was drawn, and embedded, before it.
    "refresh_every": 7,
    "epsilon": 8.0,
    "batch_size": 8,
    "microbatch_size": 4,
    "steps": _STEPS,
    "save_every": 5,
    "accountant": "rdp",
    "n_is_public": True,
}


# What is embedded once stays on disk between the kills.
_POOLED = {
    "t5.dropout": 0.0,
    "shared": False,
    "trained": "('query_tower/projection/kernel',)",
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, _POOLED], ids=["all", "pooled"])
def test_a_killed_run_goes_on_with_its_negatives_to_the_same_weights(tmp_path, changes):
    queries = _tiny.write_pairs(tmp_path / "pairs")
    train_vocabulary(queries, 300, tmp_path / "spiece.model")  # made-up queries
    settings = {
        **_SETTINGS,
        **changes,
        "pairs": tmp_path / "pairs",
        "vocabulary": tmp_path / "spiece.model",
    }
    killed, whole = (
        _killing.Run("train_retriever", tmp_path / name, "retriever", settings)
        for name in ("killed", "whole")
    )
    killed.kill_after(1)
    shutil.copytree(killed.base / "private", whole.base / "private")
    for steps in (7, 13):
        killed.kill_after(steps)
    killed.finish()
    whole.finish()
    assert killed.paid() == whole.paid() == list(range(_STEPS))
    certificates = [
        json.loads((run.out / "certificate.json").read_text())
        for run in (killed, whole)
    ]
    assert certificates[0] == certificates[1]
    models = [
        retriever.load(run.out / layout.RETRIEVER_MODEL) for run in (killed, whole)
    ]
    for one, other in zip(*(model.get_weights() for model in models)):
        np.testing.assert_array_equal(one, other)
