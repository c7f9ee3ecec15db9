"""Names of files and directories that one stage writes and another reads."""

# `train_retriever`: the directory of the model.
RETRIEVER_MODEL = "model"
# `synthesize` and `filter`: the set, with its manifest and certificate.
SET = "set"
# `prepare`: pseudo-queries cut from the public documents.
PUBLIC_PAIRS = "public_pairs"
# `evaluate` and `zero_shot`: measures by system, and the list of measures.
METRICS_FILE = "metrics.json"
METRICS = ("ndcg@10", "recall@10", "capped_recall@10", "mrr@10", "map")
# `audit`: the findings.
AUDIT_FILE = "audit.json"
