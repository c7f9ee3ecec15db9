"""The paper's comparison of retrievers, a row at a time, at its own sizes.

    python -m tfdpsq.run.pipeline --config=configs/paper/retrieval.py:ROW \
        --config.data=BEIR --workdir=DIR

Duration: not run here.
Result: not run here; the published numbers are in `tables.py`.

Tables 3 and 4 of Carranza et al. 2024 (1 and 2 of the version of 2023): retrievers on
MS MARCO trained on the original pairs, on synthetic queries by T5 size and ε, and on
the private pairs directly. ROW is one of `ROWS`, such as "original",
"synthetic-base-eps8" or "direct-eps8"; each job also makes its controls (BM25,
untrained, public-only, original).

The weights are keras-nlp's presets of T5 ("t5_small_multi", …), which it downloads;
there is none of T5-XL: give --config.init=DIRECTORY, in any format of `convert`.
Comments mark the settings that the paper leaves open.
"""

import math

from tfdpsq.run import pipeline

SIZES = ("small", "base", "large", "xl")
EPSILONS = (math.inf, 16.0, 8.0, 3.0)
# MS MARCO's training pairs, and epochs of generators and of retrievers.
PAIRS, EPOCHS, RETRIEVER_EPOCHS = 533_000, 30, 5


def _named(epsilon):
    return "inf" if math.isinf(epsilon) else f"eps{epsilon:g}"


# Row: (kind, size of the generator, ε).
ROWS = {
    "original": ("original", "base", math.inf),
    **{
        f"synthetic-{size}-{_named(epsilon)}": ("synthetic", size, epsilon)
        for size in SIZES
        for epsilon in EPSILONS
    },
    **{
        f"direct-{_named(epsilon)}": ("direct", "base", epsilon)
        for epsilon in EPSILONS
        if math.isfinite(epsilon)
    },
}


def preset(size):
    """Returns the name of keras-nlp's preset of a size; there is none of XL."""
    return f"t5_{size}_multi" if size != "xl" else "t5_xl"


def get_config(row):
    """Returns the job of a row.

    Args:
      row: one of `ROWS`.

    Raises:
      ValueError: an unknown row.
    """
    if row not in ROWS:
        raise ValueError(f"row is {row!r}; choose one of {', '.join(ROWS)}.")
    kind, size, epsilon = ROWS[row]
    config = pipeline.default_config()
    config.data = "msmarco"  # a BEIR directory
    config.init = preset(size)
    # Retrievers have a T5-base encoder, for every generator.
    config.retriever_init = preset("base")
    config.epsilons = (epsilon,) if kind == "synthetic" else ()
    config.direct_epsilons = (epsilon,) if kind == "direct" else ()
    # The number of MS MARCO's pairs is public.
    for stage in (config.finetune, config.retriever, config.direct):
        stage.n_is_public = True
    lengths = {"document_length": 384, "query_length": 128}
    for stage in (config.finetune, config.synthesize, config.retriever, config.direct):
        stage.update(lengths)

    stage = config.finetune
    stage.optimizer = "adam"
    stage.learning_rate = 1e-3
    stage.clip_norm = 0.1
    stage.batch_size = 1024
    stage.steps = round(EPOCHS * PAIRS / stage.batch_size)
    stage.t5.dropout = 0.1

    config.synthesize.top_p = 0.8
    config.synthesize.max_documents = 0  # one query for each document

    for stage in (config.retriever, config.direct):
        stage.learning_rate = 1e-3
        stage.batch_size = 32
        stage.embedding_dim = 768
        stage.shared = True
        stage.pooling = "mean"  # the paper does not say
        # The softmax as printed has no temperature; 20 would be ours.
        stage.scale = 1.0
        stage.steps = round(RETRIEVER_EPOCHS * PAIRS / stage.batch_size)
    config.direct.method = "naive"
    config.direct.clip_norm = 0.1
    return config
