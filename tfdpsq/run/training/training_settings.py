"""Settings shared by the stages that train, or use what was trained."""

from __future__ import annotations

from typing import Any

import ml_collections

from tfdpsq.data.tokenization import PROMPT
from tfdpsq.privacy import spec
from tfdpsq.privacy.plan import MOST_EPSILON
from tfdpsq.run.core import acting, settings

SCHEDULES = ("constant", "cosine")
_T5X = "t5x_adafactor"
# Settings of `optimizer_settings` that act with others only.
OPTIMIZER_ACTING = (
    acting.Only(f"{_T5X}.*", "optimizer", (_T5X,)),
    acting.Only(f"{_T5X}.epsilon2", f"{_T5X}.multiply_by_parameter_scale"),
)
WITHOUT_PRIVACY = 'Use math.inf ("inf" in a config) to train without privacy.'


def privacy_settings() -> dict[str, settings.Setting]:
    """Settings of a private training run; see `PrivacySpec` for most of them.

    `unit` is what is protected: "query", with one document of each query; "pair", with
    all pairs of the split, each a unit by itself (the paper's, and weaker: a query of k
    pairs is k units); or "user". `n_is_public` declares that the exact number of units
    may be published; otherwise `n_bound` must be a public upper bound on it.
    `user_field` names the metadata field of queries.jsonl with a query's user, for unit
    "user". `strict` refuses, or leaves
    out, every read of private data that ε does not cover. `save_every` is the number
    of steps that a killed run may have to repeat.
    """
    return {
        "epsilon": settings.Number(
            8.0, 0, MOST_EPSILON, low_open=True, infinite=True, remedy=WITHOUT_PRIVACY
        ),
        "delta": settings.Number(0.0, 0, 1, high_open=True, remedy="0 takes 1/(2n)."),
        "clip_norm": settings.Number(0.1, 0, 1e6, low_open=True),
        "accountant": settings.Text("pld", spec.ACCOUNTANTS),
        "sampler": settings.Text("poisson", spec.SAMPLERS),
        "unit": settings.Text("query", spec.UNITS),
        "user_field": settings.Text("user_id", required=True),
        "rows_per_unit": settings.Integer(1),
        "n_is_public": settings.Flag(False),
        "n_bound": settings.Integer(0, 0, 10**15),
        "engine": settings.Text("fast", spec.ENGINES),
        # Cryptographic draws, and noise that is safe in floating point.
        "secure": settings.Flag(False),
        "strict": settings.Flag(False),
        "save_every": settings.Integer(50, 1, settings.STEPS),
        "private_directory": settings.Text(""),
    }


def optimizer_settings(learning_rate: float) -> dict[str, Any]:
    """Settings of the optimizer; see `learning_rate` for `schedule`.

    `t5x_adafactor` has those of `privacy.adafactor`, by T5X's names;
    `clipping_threshold` 0 stands for `None`.
    """
    return {
        "optimizer": settings.Text("adam", spec.OPTIMIZERS),
        "learning_rate": settings.Number(learning_rate, 0, 1e3, low_open=True),
        "schedule": settings.Text("constant", SCHEDULES),
        _T5X: {
            "multiply_by_parameter_scale": settings.Flag(True),
            "decay_rate": settings.Number(0.8, 0, 10, low_open=True),
            "clipping_threshold": settings.Number(1.0, 0, 1e6),
            "min_dim_size_to_factor": settings.Integer(128),
            "epsilon1": settings.Number(1e-30, 1e-37, 1.0),
            "epsilon2": settings.Number(1e-3, 0, 1e3),
        },
    }


def optimizer_options(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the options of the optimizer that a stage's config names."""
    if config.optimizer != _T5X:
        return {}
    options = dict(config[_T5X].items())
    return {**options, "clipping_threshold": options["clipping_threshold"] or None}


def steps_settings(least: int) -> dict[str, settings.Setting]:
    """Settings of the length of training.

    `epochs` above 0 takes round(epochs * n / batch_size) steps, with n the public
    number of units that the plan has, or the number of pairs of a set; `steps` is then
    0. Otherwise `steps` are taken.
    """
    return {
        "steps": settings.Integer(1000, least, settings.STEPS, zero=True),
        "epochs": settings.Number(0.0, 0, 1e6),
    }


def t5_settings(
    vocabulary_size: int,
    num_layers: int,
    num_heads: int,
    hidden_dim: int,
    intermediate_dim: int,
    key_value_dim: int,
    version: str = "1.1",
    dropout: float = 0.1,
) -> dict[str, settings.Setting]:
    """Settings of a T5's shape, with these defaults; see `layers.T5Config`."""
    return {
        "vocabulary_size": settings.Integer(vocabulary_size, 1, 10**7),
        "num_layers": settings.Integer(num_layers, 1, settings.LAYERS),
        "num_heads": settings.Integer(num_heads, 1, settings.LAYERS),
        "hidden_dim": settings.Integer(hidden_dim, 1, settings.WIDTH),
        "intermediate_dim": settings.Integer(intermediate_dim, 1, settings.WIDTH),
        "key_value_dim": settings.Integer(key_value_dim, 1, settings.WIDTH),
        "version": settings.Text(version, ("1.0", "1.1")),
        "dropout": settings.Number(dropout, 0, 1, high_open=True),
    }


def dtype_settings() -> dict[str, settings.Setting]:
    """Settings of the precision of products; see `layers.T5Backbone`.

    "mixed_bfloat16" multiplies in bfloat16 inside the T5, which is faster on processors
    with instructions for it. Weights, softmax, norms, losses, clipping and noise stay
    in float32. Cosines of embeddings change by about 1e-4; pooling, projection and the
    division by the norm stay in float32. Embeddings of both kinds are never compared
    with each other.
    """
    return {"dtype": settings.Text(settings.FLOAT32, settings.DTYPES)}


def prompt_settings() -> dict[str, settings.Setting]:
    """Settings of the text before every document that a generator reads.

    "" is the bare document (Carranza et al. 2024); the default is that of 2023. A
    generator writes with the prompt that it was trained with.
    """
    return {"prompt": settings.Text(PROMPT)}


def length_settings(document: int, query: int) -> dict[str, settings.Setting]:
    """Settings of the maximum lengths of texts in tokens, with these defaults.

    The last token is the end of the text, so one alone would be no text.
    """
    return {
        "document_length": settings.Integer(document, 2, settings.TOKENS),
        "query_length": settings.Integer(query, 2, settings.TOKENS),
    }
