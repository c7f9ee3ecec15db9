"""The paper's comparison of retrievers, a row at a time, at its own sizes.

    tfdpsq pipeline --config=configs/paper/retrieval.py:ROW@VERSION \
        --config.data=BEIR --workdir=DIR

Duration: not run here.
Result: not run here; the published numbers are in `tables.py`.

Retrievers of Carranza et al. 2024 on MS MARCO, trained on the original pairs, on
synthetic queries by T5 size and ε, and on the private pairs directly. ROW is one of
`ROWS`, such as "original", "synthetic-base-eps8" or "direct-eps8"; each job also makes
its controls (BM25, untrained, public-only, original). VERSION of T5 is 1.0 or 1.1: the
paper does not say which it used, so neither is called the paper's.

DATA is BEIR's MS MARCO: 532,751 pairs of 502,939 queries to train on (each pair a unit,
as in the paper), 6,980 queries in `dev`, which is what is reported; BEIR's `test` holds
43 queries of TREC-DL. Steps and δ follow from the pairs that are found.

Weights are directories in any format of `convert`, named by `weights` or by
--config.init and --config.retriever_init. T5 1.1 and its LM-adapted checkpoints
(google/t5-v1_1-small, …, google/t5-xl-lm-adapt) were pretrained on C4 alone; published
T5 1.0, and keras-nlp's presets ("t5_base_multi"), also learned labelled tasks, which
may hold MS MARCO: say so next to the results. `MEMORY` trains XL with LoRA, which is a
difference from the paper, and with DP-Adafactor, which the paper names next to DP-Adam,
as T5X has it.
Comments mark the settings that the paper leaves open.

Every row clips by engine "fast": tensorflow-privacy's engines give the same sums (see
`configs/dpkeras.py`), but hold a gradient of the T5's size for each row of a
microbatch.
"""

import math

from tfdpsq.run.stages import pipeline

SIZES = ("small", "base", "large", "xl")
EPSILONS = (math.inf, 16.0, 8.0, 3.0)
# MS MARCO's training pairs in BEIR, of 502,939 queries; for planning ahead. A job
# counts those that it finds.
PAIRS = 532_751
PROMPT, BARE = "generate_query: ", False  # True trains without it, as the 2024 text
# Epochs of generators and of retrievers.
EPOCHS, RETRIEVER_EPOCHS = 30.0, 5.0
# Settings of sizes whose whole training does not fit into common accelerators: XL's
# weights, their summed gradients and Adam's slots take 46 GB in float32.
MEMORY = {
    "xl": {
        "optimizer": "t5x_adafactor",
        # Relative to a weight's size, of which LoRA's zeros have .001. Tried on the
        # shipped T5, rank 16, 30 steps of 256 rows of pydocs, loss at the end without
        # DP and at ε = 8: .001 gives 4.48 and 4.54 (4.54 at the start), .1 gives 3.36
        # and 4.31, 1 and 10 diverge without DP. (Adam at .001 gives 3.48 without DP.)
        "learning_rate": 0.1,
        "microbatch_size": 4,
        "rematerialize": True,
        "lora": {"rank": 16, "alpha": 16.0},
    }
}


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


def weights(size, version="1.1"):
    """Returns the directory that a size's weights are looked for in."""
    if version not in ("1.0", "1.1"):
        raise ValueError(f"the version of T5 is {version!r}; choose 1.0 or 1.1.")
    return f"t5_1_1_{size}_lm" if version == "1.1" else f"t5_1_0_{size}"


def get_config(row):
    """Returns the job of a row.

    Args:
      row: one of `ROWS`, perhaps with "@1.0" or "@1.1", the version of T5.

    Raises:
      ValueError: an unknown row or version.
    """
    row, _, version = row.partition("@")
    if row not in ROWS:
        raise ValueError(f"row is {row!r}; choose one of {', '.join(ROWS)}.")
    kind, size, epsilon = ROWS[row]
    config = pipeline.STAGE.config()
    config.data = "msmarco"  # a BEIR directory
    config.init = weights(size, version or "1.1")
    # Retrievers have a T5-base encoder, for every generator.
    config.retriever_init = weights("base", version or "1.1")
    config.epsilons = (epsilon,) if kind == "synthetic" else ()
    config.direct_epsilons = (epsilon,) if kind == "direct" else ()
    # The number of MS MARCO's pairs is public, and each is an example.
    for stage in (config.finetune, config.retriever, config.direct):
        stage.n_is_public = True
        stage.unit = "pair"
    config.evaluate.split = "dev"
    # BLEU of a synthetic query is against the original one of the same document.
    config.evaluate.similarity_split = "train"
    lengths = {"document_length": 384, "query_length": 128}
    for stage in (config.finetune, config.retriever, config.direct):
        stage.update(lengths)

    config.finetune.prompt, config.finetune.bare = PROMPT, BARE
    stage = config.finetune
    stage.optimizer = "adam"
    stage.learning_rate = 1e-3
    stage.clip_norm = 0.1
    stage.batch_size = 1024
    stage.steps, stage.epochs = 0, EPOCHS
    stage.update(MEMORY.get(size, {}))

    config.synthesize.top_p = 0.8
    config.synthesize.samples_per_document = 1
    # One query for each document of a training pair. MS MARCO's pairs are published.
    config.synthesize.documents = "train"
    config.synthesize.training_documents_are_public = True

    for stage in (config.retriever, config.direct):
        stage.learning_rate = 1e-3
        stage.batch_size = 32
        stage.embedding_dim = 768
        stage.shared = True
        stage.pooling = "mean"  # the paper does not say
        # The softmax as printed has no temperature; 20 would be ours.
        stage.scale = 1.0
        # And its denominator has every other row's document.
        stage.false_negatives = True
    # Of each row's own set, private or synthetic.
    config.retriever.steps, config.retriever.epochs = 0, RETRIEVER_EPOCHS
    config.direct.method = "naive"
    config.direct.clip_norm = 0.1
    return config
