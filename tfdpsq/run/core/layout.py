"""Names of what stages write, for the stages that read it."""

# `train_retriever`: the model's directory.
RETRIEVER_MODEL = "model"
# `synthesize` and `filter`: the set, with its manifest and certificate.
SET = "set"
# `prepare`: pseudo-queries cut from the documents alone.
PUBLIC_PAIRS = "public_pairs"
# `evaluate` and `zero_shot`: measures by system, and which measures there are.
METRICS_FILE = "metrics.json"
METRICS = ("ndcg@10", "recall@10", "capped_recall@10", "mrr@10", "map")
# `audit`: its findings.
AUDIT_FILE = "audit.json"
