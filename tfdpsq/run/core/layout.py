"""Names of files and directories that one command writes and another reads."""

import math

# `train_retriever`: the directory of the model.
RETRIEVER_MODEL = "model"
# `train_adapter`: the matrix.
ADAPTER_FILE = "adapter.npy"
# `synthesize` and `filter`: the set, with its manifest and certificate.
SET = "set"
# `pipeline`: private pairs that it imported from a log.
IMPORTED = "pairs"
# `prepare`: pseudo-queries cut from the public documents.
PUBLIC_PAIRS = "public_pairs"
# `evaluate` and `zero_shot`: measures by system, judgements, and the list of measures.
METRICS_FILE = "metrics.json"
QRELS_FILE = "qrels.trec"
# `zero_shot`: the folder with an output for each set.
SETS = "runs"
METRICS = ("ndcg@10", "recall@10", "capped_recall@10", "mrr@10", "map")
# `audit`: the findings.
AUDIT_FILE = "audit.json"
# Below a private directory.
# Of a training run, besides its ledger and `checkpoint.STATE`: its settings, and the
# tokenised pairs of a training that is killed.
RUN_FILE = "run.json"
RUNS = "runs"
LOGS = "logs"  # of all stages, a folder each
ROWS = "rows"
# Of a log, besides `point_log.FILE_NAME`, by any stage or by a process of a pass.
CURVE_FILE = "curve.json"
EVENTS = "events.out.tfevents."  # as TensorFlow calls them
PROCESS = "process-"
# `reproduce`: measures on private queries; and, in the private directory, examples,
# which quote private queries.
TABLE_FILES = ("tables.json", "tables.html")
EXAMPLE_FILES = ("examples.json", "examples.html")
# Of a whole job, which show private queries.
JOB_FILES = ("report.html", "results.json", *TABLE_FILES)


def epsilon_name(epsilon: float) -> str:
    """Returns the part of file names for an ε: "inf", or "eps8" for 8.0."""
    return "inf" if math.isinf(epsilon) else f"eps{epsilon:g}"


def epsilon_row(epsilon: float) -> str:
    """Returns the part of rows' names for an ε: "inf", or "eps0_5" for 0.5.

    Rows are keys of settings, which take no dot.
    """
    return epsilon_name(epsilon).replace(".", "_")
