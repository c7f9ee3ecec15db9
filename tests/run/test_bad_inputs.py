"""Bad input through the command line: one line on standard error, status 2, by message.

Every row is a command as a user types it. They run in this process, through each
stage's own entry point, as importing TensorFlow takes seconds; a few run again as
processes (slow).
"""

import contextlib
import io
import os
import pathlib
import runpy
import signal
import subprocess
import sys

import pytest
from absl import flags
from helpers import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]

LONG = "9" * 5000
DEEP = "[" * 100_000

# Stage -> rows of (a setting with its bad value, what the message says of it).
SETTINGS = {
    "finetune": [
        ("learning_rate=nan", "learning_rate is nan; it must be a finite number"),
        ("learning_rate=inf", "learning_rate is inf; it must be a finite number"),
        ("learning_rate=-1", "learning_rate is -1.0; it must be a finite number above"),
        ("learning_rate=0", "learning_rate is 0.0; it must be a finite number above 0"),
        ("learning_rate=1e30", "learning_rate is 1e+30; it must be at most 1000"),
        ("learning_rate=fast", "--config.learning_rate=fast"),
        ("steps=0", "steps is 0 and epochs is 0.0: nothing would be trained"),
        ("steps=-5", "steps is -5; it must be an integer of"),
        ("steps=1.5", "--config.steps=1.5"),
        ("steps=99999999999", "steps is 99999999999; it must be an integer of at most"),
        (f"steps={LONG}", "--config.steps=999"),
        ("batch_size=0", "batch_size is 0; it must be an integer of at least 1"),
        ("batch_size=-8", "batch_size is -8; it must be an integer of at least 1"),
        ("microbatch_size=0", "microbatch_size is 0; it must be an integer"),
        (
            "epsilon=0",
            "epsilon is 0.0; it must be a finite number above 0, or inf. Use",
        ),
        ("epsilon=-1", "epsilon is -1.0; it must be a finite number above 0, or inf"),
        ("epsilon=nan", "epsilon is nan; it must be"),
        ("epsilon=1e300", "epsilon is 1e+300; it must be at most 300"),
        # It was paid for, and `verify` refused the certificate.
        ("epsilon=1000", "epsilon is 1000.0; it must be at most 300"),
        ("delta=1", "delta is 1.0; it must lie in [0, 1)"),
        ("delta=-0.1", "delta is -0.1; it must lie in [0, 1)"),
        ("delta=nan", "delta is nan; it must lie in [0, 1)"),
        ("clip_norm=0", "clip_norm is 0.0; it must be a finite number above 0"),
        ("clip_norm=nan", "clip_norm is nan; it must be a finite number above 0"),
        # As float32 they are 0, and would spend the budget on nothing.
        ("clip_norm=2e-38", "clip_norm is 2e-38; it must be at least 1e-18"),
        ("learning_rate=1e-50", "learning_rate is 1e-50; it must be at least 1e-18"),
        ("epsilon=1e-300", "epsilon is 1e-300; it must be at least 1e-18"),
        ("clip_norm=inf", "clip_norm is inf; it must be a finite number above 0"),
        ("seed=-1", "seed is -1; it must be an integer of at least 0"),
        ("seed=9999999999", "seed is 9999999999; it must be an integer of at most"),
        ("save_every=0", "save_every is 0; it must be an integer of at least 1"),
        ("save_every=-1", "save_every is -1; it must be an integer of at least 1"),
        ("n_bound=-1", "n_bound is -1; it must be an integer of at least 0"),
        ("rows_per_unit=0", "rows_per_unit is 0; it must be an integer"),
        ("unit=person", "unit is 'person'; choose one of 'query', 'pair', 'user'"),
        ("sampler=all", "sampler is 'all'; choose one of 'poisson', 'shuffled'"),
        ("accountant=moments", "accountant is 'moments'; choose one of 'pld', 'rdp'"),
        ("engine=jax", "engine is 'jax'; choose one of 'fast'"),
        ("optimizer=lion", "optimizer is 'lion'; choose one of"),
        ("schedule=linear", "schedule is 'linear'; choose one of 'constant', 'cosine'"),
        ("dtype=float8", "dtype is 'float8'; choose one of 'float32'"),
        ("document_length=0", "document_length is 0; it must be an integer"),
        ("query_length=-3", "query_length is -3; it must be an integer"),
        (
            "query_length=9999999",
            "query_length is 9999999; it must be an integer of at",
        ),
        ("t5.dropout=1", "t5.dropout is 1.0; it must lie in [0, 1)"),
        ("t5.dropout=nan", "t5.dropout is nan; it must lie in [0, 1)"),
        ("t5.version=2.0", "t5.version is '2.0'; choose one of '1.0', '1.1'"),
        ("t5.num_layers=0", "t5.num_layers is 0; it must be an integer of at least 1"),
        ("t5.hidden_dim=-1", "t5.hidden_dim is -1; it must be an integer"),
        ("lora.rank=-1", "lora.rank is -1; it must be an integer of at least 0"),
        ("lora.alpha=0", "lora.alpha is 0.0; it must be a finite number above 0"),
        ("soft_prompt.length=-1", "soft_prompt.length is -1; it must be an integer"),
        ("trained=()", "trained is (); it must hold at least 1 value"),
        ("strict=perhaps", "--config.strict=perhaps"),
        ("user_field=", "user_field is ''; it must be set"),
        ("pairs=", "pairs is ''; it must be set"),
        ("pairs=" + "x" * 5000, "pairs is 'xxx"),
        ("init=/no/such/model", "/no/such/model"),
        ("vocabulary=/no/such/file", "/no/such/file: cannot be read"),
        ("learning_rat=1", "no setting --config.learning_rat. Did you mean --config.l"),
        ("rank=3", "no setting --config.rank. Did you mean --config.lora.rank"),
        ("t5.layers=3", "no setting --config.t5.layers"),
        ("zzzz=3", "no setting --config.zzzz. There are "),
        ("steps.more=3", "no setting --config.steps.more"),
    ],
    "train_retriever": [
        ("method=dp", "method is 'dp'; choose one of 'plain'"),
        ("scale=0", "scale is 0.0; it must be a finite number above 0"),
        ("scale=nan", "scale is nan; it must be a finite number above 0"),
        ("steps=-1", "steps is -1; it must be an integer of at least 0"),
        ("embedding_dim=0", "embedding_dim is 0; it must be an integer of at least 1"),
        ("pooling=max", "pooling is 'max'; choose one of 'mean', 'first'"),
        ("rows_at_a_time=-1", "rows_at_a_time is -1; it must be an integer"),
        ("learning_rate=nan", "learning_rate is nan; it must be a finite number"),
        ("negatives=0", "negatives is 0; it must be an integer of at least 1"),
        ("refresh_every=0", "refresh_every is 0; it must be an integer of at least 1"),
        ("clip_groups=0", "clip_groups is 0; it must be an integer of at least 1"),
        ("most_documents=0", "most_documents is 0; it must be an integer"),
        ("hard_negatives.count=0", "hard_negatives.count is 0; it must be an integer"),
        ("hard_negatives.skip=-1", "hard_negatives.skip is -1; it must be an integer"),
        ("hard_negatives.made_from=x", "hard_negatives.made_from is 'x'; choose one"),
        ("epsilon=3", "epsilon is 3.0 but method 'plain' adds no noise"),
        ("seed=-1", "seed is -1; it must be an integer of at least 0"),
    ],
    "pretrain": [
        ("steps=0", "steps is 0; it must be an integer of at least 1"),
        ("learning_rate=nan", "learning_rate is nan; it must be a finite number"),
        ("contrast_weight=-1", "contrast_weight is -1.0; it must be a finite number"),
        ("warmup=0", "warmup is 0; it must be an integer of at least 1"),
        ("held_out_one_in=0", "held_out_one_in is 0; it must be an integer"),
        ("watch_every=-1", "watch_every is -1; it must be an integer"),
        ("pair_rows=0", "pair_rows is 0; it must be an integer of at least 1"),
        ("stored=int8", "stored is 'int8'; choose one of 'float32'"),
        ("optimizer=sgd", "optimizer is 'sgd'; choose one of 'adafactor', 'adam'"),
        ("resize.num_layers=-1", "resize.num_layers is -1; it must be an integer"),
        ("resize.num_layers=2", "it acts only where init is set"),
        ("t5.vocabulary_size=50", "t5.vocabulary_size is 50"),
    ],
    "prepare": [
        ("vocabulary_size=-1", "vocabulary_size is -1; it must be an integer"),
        ("vocabulary_size=5000000000", "vocabulary_size is 5000000000; it must be an"),
        (
            "vocabulary_size=100000",
            "vocabulary_size is 100000, but these texts give at",
        ),
        ("vocabulary_size=10", "vocabulary_size is 10, but these texts need at least"),
        ("pseudo_queries_per_document=0", "pseudo_queries_per_document is 0; it must"),
        ("seed=-1", "seed is -1; it must be an integer of at least 0"),
        ("data=/no/such/beir", "/no/such/beir"),
        ("splits=('trian',)", "trian"),
    ],
    "synthesize": [
        ("temperature=-1", "temperature is -1.0; it must be a finite number"),
        ("temperature=nan", "temperature is nan; it must be a finite number"),
        ("top_p=0", "top_p is 0.0; it must lie in (0, 1]"),
        ("top_p=1.5", "top_p is 1.5; it must lie in (0, 1]"),
        ("top_k=-1", "top_k is -1; it must be an integer of at least 0"),
        ("batch_size=0", "batch_size is 0; it must be an integer of at least 1"),
        ("shards=0", "shards is 0; it must be an integer of at least 1"),
        ("shard_documents=0", "shard_documents is 0; it must be an integer"),
        ("samples_per_document=0", "samples_per_document is 0; it must be an integer"),
        ("max_documents=-1", "max_documents is -1; it must be an integer"),
        ("dtype=float16", "dtype is 'float16'; choose one of 'float32'"),
    ],
    "evaluate": [
        ("k=0", "k is 0; it must be an integer of at least 1"),
        ("k=5", "Raise k"),
        ("resamples=0", "resamples is 0; it must be an integer of at least 1"),
        ("index=tree", "index is 'tree'; choose one of"),
        ("systems.mine=", "systems.mine is ''. Give it the directory"),
        ("systems.nine=x", "no setting --config.systems.nine. Did you mean"),
        ("similarity.seeds=1", "similarity.seeds is 1; it must be an integer of at"),
        ("similarity.samples=0", "similarity.samples is 0; it must be an integer"),
        ("similarity.featurizer=bert", "similarity.featurizer is 'bert'; choose one"),
        ("seed=-1", "seed is -1; it must be an integer of at least 0"),
    ],
    "zero_shot": [
        ("k=0", "k is 0; it must be an integer of at least 1"),
        ("metrics=()", "metrics is (); it must hold at least 1 value"),
        ("systems.mine=", "systems.mine is ''. Give it the directory"),
        ("batch_size=0", "batch_size is 0; it must be an integer of at least 1"),
    ],
    "mine": [
        ("k=0", "k is 0; it must be an integer of at least 1"),
        ("split=", "split is ''; it must be set"),
        ("pairs=/no/such/place", "/no/such/place"),
    ],
    "canaries": [
        ("digits=3", "digits is 3; it must be an integer of at least 8"),
        ("digits=30", "digits is 30; it must be an integer of at most 18"),
        ("candidates=2", "candidates is 2; it must be an integer of at least 20"),
        ("coins=3", "coins is 3; it must be an integer of at least 24, or 0"),
        ("repetitions=(0,)", "repetitions[0] is 0; it must be an integer"),
        ("trials=-1", "trials is -1; it must be an integer"),
    ],
    "audit": [
        ("confidence=1", "confidence is 1.0; it must lie in (0.5, 1)"),
        ("confidence=nan", "confidence is nan; it must lie in (0.5, 1)"),
        ("members=1", "members is 1; it must be an integer of at least 2. A comp"),
        ("top=0", "top is 0; it must be an integer of at least 1"),
        ("canaries=", "canaries is ''. Give the directory that the stage canaries"),
    ],
    "filter": [
        ("min_known=2", "min_known is 2.0; it must lie in [0, 1]"),
        ("min_known=abc", "flag --config.min_known=abc: it must be a number."),
        ("min_words=abc", "flag --config.min_words=abc: it must be an integer."),
        ("min_known=nan", "min_known is nan; it must lie in [0, 1]"),
        ("min_words=-1", "min_words is -1; it must be an integer of at least 0"),
        ("round_trip.k=0", "round_trip.k is 0; it must be an integer of at least 1"),
        ("shards=0", "shards is 0; it must be an integer of at least 1"),
        ("synthetic=", "synthetic is ''; give a set that synthesize wrote"),
    ],
    "rerank": [
        ("depth=1", "depth is 1; it must be an integer of at least 2"),
        ("weight=nan", "weight is nan; it must lie in (0, 1]"),
        ("query_length=1", "query_length is 1; it must be an integer of at least 2"),
        ("generator=", "generator is ''. Give it what finetune wrote"),
    ],
    "overlap": [
        ("near=0", "near is 0.0; it must lie in (0, 1]"),
        ("n=0", "n is 0; it must be an integer of at least 1"),
        ("draws=0", "draws is 0; it must be an integer of at least 1"),
        ("draw_size=-1", "draw_size is -1; it must be an integer of at least 1"),
        ("examples=-1", "examples is -1; it must be an integer of at least 0"),
        ("threads=0", "threads is 0; it must be an integer of at least 1"),
        ("format=csv", "format is 'csv'; choose one of"),
        ("texts=()", "texts is empty; name 'queries', 'documents' or both"),
    ],
    "index": [
        ("kind=tree", "kind is 'tree'; choose one of 'exact'"),
        ("batch_size=0", "batch_size is 0; it must be an integer of at least 1"),
        ("retriever=", "retriever is ''"),
    ],
    "encode": [
        ("texts=both", "texts is 'both'; choose one of 'documents', 'queries'"),
        ("shard_documents=0", "shard_documents is 0; it must be an integer"),
    ],
    "grid": [
        ("stage=pretrain", "stage is 'pretrain'; choose one of 'finetune'"),
        ("held_out=0", "held_out is 0; it must be an integer of at least 2"),
        ("finetune.clip_norm=-1", "finetune.clip_norm is -1.0; it must be a finite"),
        ("axes=3", "axes[0] is 3; it must be (setting, values)"),
    ],
    "choose": [
        ("choice=best", "choice is 'best'; choose one of 'declared', 'accounted'"),
        ("choice_epsilon=nan", "choice_epsilon is nan; it must be a finite number"),
        ("finetune.learning_rate=nan", "finetune.learning_rate is nan; it must be a"),
        ("synthesize.top_p=0", "synthesize.top_p is 0.0; it must lie in (0, 1]"),
        ("held_out=train", "held_out and finetune.split are both 'train'"),
    ],
    "pipeline": [
        ("epsilons=(0.0,)", "epsilons[0] is 0.0; it must be a number above 0. Every"),
        ("epsilons=(inf,0.0)", "epsilons[1] is 0.0; it must be a number above 0"),
        ("direct_epsilons=(float('inf'),-1.0)", "direct_epsilons[1] is -1.0; it must"),
        ("finetune.learning_rate=nan", "finetune.learning_rate is nan; it must be a"),
        ("direct.method=plain", "direct.method is 'plain'; choose one of 'naive'"),
        ("retriever.batch_size=0", "retriever.batch_size is 0; it must be an integer"),
        ("evaluate.k=0", "evaluate.k is 0; it must be an integer of at least 1"),
        ("seed=-1", "seed is -1; it must be an integer of at least 0"),
        ("examples=-1", "examples is -1; it must be an integer of at least 0"),
        ("learning_rate=1", "Did you mean --config."),
        ("strict=True", "strict is True, but this job measures every row"),
    ],
    "reproduce": [
        ("resamples=0", "resamples is 0; it must be an integer of at least 1"),
        ("retriever_size=", "retriever_size is ''; it must be set"),
        (
            "job.finetune.steps=0",
            "in the settings of `finetune`: steps is 0 and epochs",
        ),
        ("audit.unit=person", "audit.unit is 'person'; choose one of"),
    ],
}
_CONFIGS = {
    **{path.stem: path.name for path in (ROOT / "configs").glob("*.py")},
    "pipeline": "quickstart.py",
    "reproduce": "paper/tables.py:tiny",
}

# (arguments, what the message says) of commands whose flags are wrong.
COMMANDS = [
    # As Python takes bytes that are not UTF-8 from the command line.
    ("finetune --workdir=@/a\udcff", "--workdir is given "),
    ("synthesize --workdir @/a\udcff", "--workdir is given "),
    ("finetune --workdir=@/out --config.prompt=\udcff", "--config.prompt is given "),
    ("finetune --flagfile=/no/such/file", "Unable to open flagfile"),
    ("reproduce --scale", "Missing value for flag --scale"),
    ("reproduce --workdir", "Missing value for flag --workdir"),
    ("reproduce --flagfile=/no/such/file", "Unable to open flagfile"),
    ("estimate", "no config was given. Pass --config=FILE"),
    ("estimate --config=configs/finetune.py extra", "unexpected arguments: extra"),
    ("estimate --config=configs/finetune.py --wrokdir=x", "there is no flag --wrok"),
    ("estimate_job --config=@/none.py", "where there is no file"),
    ("estimate_job --config=configs/finetune.py --price=x", "price"),
    # The flag was as if not given, and the settings' faults were of helpers.
    ("estimate --config=configs/finetune.py --json=", "--json is given as an empty"),
    ("estimate_job --config=configs/finetune.py --json=", "--json is given as an emp"),
    ("estimate_job --config=configs/finetune.py --from_logs=", "--from_logs is given"),
    (
        "estimate --config=configs/quickstart.py --config.finetune.microbatch_size=0",
        "error: finetune.microbatch_size is 0; it must be an integer of at least 1",
    ),
    (
        "estimate --config=configs/quickstart.py --config.finetune.steps=0",
        "error: finetune.steps is 0 and epochs is 0.0: nothing",
    ),
    (
        "estimate --config=configs/filter.py",
        "of the stage filter; costs are estimated of the stage finetune, and of a pipe",
    ),
    ("estimate_job --config=configs/grid.py", "the config is of the stage grid; costs"),
    (
        "estimate_job --config=configs/choose.py",
        "the config is of the stage choose; co",
    ),
    (
        "estimate_job --config=configs/quickstart.py --config.retriever.batch_size=0",
        "error: retriever.batch_size is 0; it must be an integer of at least 1",
    ),
    (
        "estimate_job --config=configs/quickstart.py --config.retriever.epochs=2",
        "error: retriever.epochs is 2.0 and steps ",
    ),
    (
        "estimate_job --config=configs/finetune.py --config.t5.hidden_dim=0",
        "error: t5.hidden_dim is 0; it must be an integer of at least 1",
    ),
    (
        "estimate_job --config=configs/finetune.py --pairs=1000000000000 --epochs=9999",
        "error: pairs * epochs / batch_size is ",
    ),
    (
        "mine --workdir=@/o --config.pairs=@/pairs "
        "--config.private_directory=gs://bucket/keys",
        "private_directory is gs://bucket/keys; keys and ledgers are kept on this",
    ),
    ("finetune --workdir=@/out", "no vocabulary was given"),
    ("mine --workdir=@/o --config.no_such=1", "there is no setting --config.no_such"),
    ("mine --workdir=@/o --config.no_such=1 --config=@/none.py", "there is no file"),
    ("finetune --config=@/none.py --workdir=@/out", "where there is no file"),
    ("finetune --config= --workdir=@/out", "where there is no file"),
    ("finetune --config=@ --workdir=@/out", "where there is no file"),
    ("finetune --config=@/text.py --workdir=@/out", "text.py:1: it is not Python"),
    ("finetune --config=@/bytes.py --workdir=@/out", "bytes.py"),
    ("finetune --config=@/empty.py --workdir=@/out", "has no function get_config()"),
    ("finetune --config=@/raises.py --workdir=@/out", "raises.py:3: the config fails"),
    ("finetune --config=@/exits.py --workdir=@/out", "exits.py:1: the config fails"),
    ("finetune --config=@/imports.py --workdir=@/out", "ModuleNotFoundError"),
    (
        "finetune --config=@/three.py --workdir=@/out",
        "get_config() returned 3; it must",
    ),
    ("finetune --config=@/locked.py --workdir=@/out", "get_config() returned None; it"),
    ("finetune --config=configs/finetune.py:8 --workdir=@/o", "takes no argument"),
    ("pipeline --config=configs/paper/retrieval.py --workdir=@/o", "needs an argument"),
    (
        "pipeline --config=configs/paper/retrieval.py:x --workdir=@/o",
        "row is 'x'; choo",
    ),
    ("finetune --config=configs/filter.py --workdir=@/o", "config of the stage filter"),
    (
        "prepare --config=configs/finetune.py --workdir=@/o",
        "of the stage finetune, but",
    ),
    ("choose --config=configs/grid.py --workdir=@/o", "config of the stage grid"),
    ("finetune --config=configs/quickstart.py --workdir=@/o", "of the stage pipeline"),
    ("mine", "no workdir was given. Pass --workdir=DIRECTORY"),
    ("mine --workdir=", "no workdir was given. Pass"),
    ("mine --workdir=gs://b/o", "this stage writes to local"),
    ("mine --workdir=@/text.py", "text.py is not a dir"),
    ("mine --workdir=@/text.py/o", "text.py is not"),
    ("mine --workdir=@/o extra", "unexpected arguments: extra"),
    ("mine --workdir=@/o --wrokdir=x", "no flag --wrokdir. Did"),
    ("mine --workdir=@/o --beam", "--beam"),
    ("mine --workdir=@/o --strategy=gpu", "strategy is 'gpu'"),
    ("mine --workdir=@/o --strategy=mirrored", "trains nothing"),
    (
        "finetune --config=configs/finetune.py --workdir=@/o --replicas=0",
        "replicas is 0",
    ),
    (
        "finetune --config=configs/finetune.py --workdir=@/o --replicas=-2",
        "replicas is -",
    ),
    ("finetune --config=configs/finetune.py --workdir=@/o --replicas=x", "replicas"),
    ("finetune --config=configs/finetune.py --workdir=@/o --replicas=2", "mirrored"),
    ("finetune --config=configs/finetune.py --workdir=@/o --tpu=x", "applies to"),
    (
        "finetune --config=configs/finetune.py --workdir=@/o --steps_per_loop=0",
        "steps_per_loop is 0; it must be an integer of at least 1",
    ),
    (
        "synthesize --workdir=@/o --num_shards=0",
        "num_shards is 0; it must be an integer of at least 1",
    ),
    (
        "synthesize --workdir=@/o --num_shards=-1",
        "num_shards is -1; it must be an integer of at least 1",
    ),
    (
        "synthesize --workdir=@/o --num_shards=2 --shard_index=2",
        "shard_index is 2; with num_shards = 2 it must be an integer from 0 to 1",
    ),
    ("synthesize --workdir=@/o --shard_index=-1", "shard_index is -1"),
    (
        "synthesize --workdir=@/o --shard_index=1",
        "shard_index is 1, but num_shards was not given",
    ),
    ("prepare --workdir=@/o --config.data=@/deep", "deeply"),
    ("prepare --workdir=@/o --config.data=@/long", "digits"),
    (
        "mine --workdir=@/o --config.pairs=@/pairs "
        "--config.private_directory=@/text.py",
        "text.py",
    ),
    ("mine --workdir=@/stray --config.pairs=@/pairs", "stage.js"),
    # These were tracebacks, or said nothing of the setting.
    (
        "synthesize --workdir=s3://bucket/x --config.corpus=@/pairs "
        "--config.generator=t5_tiny_pydocs",
        "s3://bucket/.x.shards/plan.json is of a file system 's3'",
    ),
    (
        "import --workdir=@/out --config.logs.train=s3://bucket/x.csv "
        "--config.log_documents_are_public=True",
        "s3://bucket/x.csv is of a file system 's3', which TensorFlow does not know",
    ),
    (
        "canaries --workdir=@/out --config.data=@/pairs "
        "--config.private_directory=@/loop",
        "out is not under",
    ),
    (
        "filter --workdir=@/out --config.round_trip.retriever=bm25 "
        "--config.round_trip.vocabulary=/none",
        "round_trip.vocabulary is '/none', which does nothing here: 'bm25' has none",
    ),
    ("mine --workdir=@/out --config=@/cycle.py", "a config that holds itself"),
    ("mine --workdir=@/out --config=@/number.py", "a name that is not a text"),
    ("mine --workdir=@/out --config=@/half.py", "pairs is '/tmp/\\udcff'; it must be"),
    ("mine --workdir=@/out --config=@/talks.py", "... (600,012 characters)"),
    ("mine --workdir=@/out --config=@/frozen.py", "/no/such: no such directory"),
    ("mine --workdir=@/out --config=@/must.py", "k has no value, but a required"),
    (
        "mine --workdir=@/out --config=@/must.py --config.k=3",
        "use placeholder(TYPE) there, which --config.k=VALUE sets",
    ),
    ("mine --workdir=@/out --config=@/may.py --config.k=3", "/no/such: no such"),
    ("mine --workdir=@/out --config.k[0]=3", "Give the whole: --config.k=VALUE"),
    ("mine --workdir=@/out --config.=3", "there is no setting --config.. There are"),
    ("mine --workdir=@/out --flagfile=@/bytes.py", "a --flagfile is not in UTF-8"),
    (
        "prepare --workdir=@/taken --config.data=@/pairs --config.vocabulary_size=0",
        "already exists, and is not an empty directory. Choose another",
    ),
]

ROWS = [
    (
        f"{stage} {f'--config=configs/{_CONFIGS[stage]} ' if stage in _CONFIGS else ''}"
        "--workdir=@/out "
        f"{'--config.data=@/pairs ' if stage == 'prepare' else ''}--config.{bad}",
        said,
    )
    for stage, rows in SETTINGS.items()
    for bad, said in rows
] + COMMANDS


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory of bad files, and one of good pairs."""
    base = tmp_path_factory.mktemp("bad")
    tiny.write_pairs(base / "pairs", train=8, dev=2, test=2)
    config = "import ml_collections\n\n\ndef get_config():\n"
    for name, text in {
        "text": "this is not Python at all\n",
        "empty": "",
        "raises": "def get_config():\n    x = 0\n    return 1 / x\n",
        "exits": "raise SystemExit(0)\n",
        "imports": "import no_such_module_at_all\n",
        "three": "def get_config():\n    return 3\n",
        "locked": config + "    ml_collections.ConfigDict({'a': 1}).b = 2\n",
        "talks": "def get_config():\n    raise ValueError('word ' * 120_000)\n",
    }.items():
        (base / f"{name}.py").write_text(text)
    for name, line in {
        "cycle": "c.unlock(); c['more'] = c",
        "number": "c = ml_collections.ConfigDict({**c.to_dict(), 5: 1})",
        "half": "c.pairs = '/tmp/\\udcff'",
        "frozen": "c = ml_collections.FrozenConfigDict(c)",
        "must": "del c.k; c.k = ml_collections.config_dict.required_placeholder(int)",
        "may": "del c.k; c.k = ml_collections.config_dict.placeholder(int)",
    }.items():
        (base / f"{name}.py").write_text(
            "import ml_collections\nfrom tfdpsq.run import mine\n\n\ndef get_config():"
            "\n    c = mine.default_config()\n    c.unlock(); c.pairs = '/no/such'\n"
            f"    {line}\n    return c\n"
        )
    (base / "bytes.py").write_bytes(bytes(range(256)))
    for name, record in {
        "deep": '{"_id": "d0", "text": ' + DEEP + "}",
        "long": '{"_id": "d0", "text": "x", "n": ' + LONG + "}",
    }.items():
        tiny.write_pairs(base / name, train=8, dev=2, test=2)
        (base / name / "corpus.jsonl").write_text(record + "\n")
    (base / "loop").symlink_to(base / "loop")
    (base / "taken").mkdir()
    (base / "taken" / "thesis.txt").write_text("not ours")
    (base / "stray").mkdir()
    (base / "stray" / "stage.json").write_text(DEEP)
    return base


def _run(words):
    """Exit status and standard error of a command, by its own entry point."""
    stage, *arguments = words
    known = set(flags.FLAGS)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    argv, errors = sys.argv, io.StringIO()
    sys.argv = [stage, *arguments]
    try:
        with contextlib.redirect_stderr(errors), contextlib.chdir(ROOT):
            runpy.run_module(f"tfdpsq.run.{stage}", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = argv
        for name in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status, errors.getvalue()


def test_the_table_is_long_enough():
    assert len(ROWS) >= 150 and len({command for command, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("command", "said"), ROWS, ids=[command[:90] for command, _ in ROWS]
)
def test_bad_input_is_one_line_and_status_2(base, command, said):
    before = sorted(path.name for path in base.iterdir())
    status, errors = _run(command.replace("@", str(base)).split(" "))
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(lines) == 1, errors[-2000:]
    assert said in lines[0] and "Traceback" not in errors
    assert len(lines[0]) < 2500 and "9" * 300 not in lines[0]
    # Nothing was made but what belongs to the private directory beside the output.
    assert {path.name for path in base.iterdir()} - {*before, "private", "o"} == set()
    if "thesis" in str(list((base / "taken").iterdir())):
        assert "elete" not in lines[0] or "stage.json" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, len(ROWS), max(1, len(ROWS) // 10)))
def test_the_same_as_a_process(base, number):
    command, said = ROWS[number]
    stage, *words = command.replace("@", str(base)).split(" ")
    done = subprocess.run(
        [sys.executable, "-m", f"tfdpsq.run.{stage}", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_being_asked_to_end_before_training_is_75(base, number, tmp_path):
    config = tmp_path / "slow.py"
    config.write_text(
        "import time\n\nfrom tfdpsq.data import BeirDirectory\n"
        "from tfdpsq.run import mine\n\n\n"
        "def documents(self):\n    print('here', flush=True)\n    time.sleep(600)\n"
        "\n\ndef get_config():\n    BeirDirectory.documents = documents\n"
        "    return mine.default_config()\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tfdpsq.run.mine", f"--config={config}"),
            f"--workdir={tmp_path / 'private' / 'out'}",
            f"--config.pairs={base / 'pairs'}",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "here\n" in iter(process.stdout.readline, "")  # others print, too
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "Start the same command again to go on." in errors
    assert "Traceback" not in errors
