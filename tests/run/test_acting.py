"""Every setting acts or is refused: changed settings without effect, in all stages."""

import importlib
import pathlib
import pkgutil
import runpy

import ml_collections
import numpy as np
import pytest
import tensorflow as tf
from helpers import tiny as _tiny

from tfdpsq import retriever
from tfdpsq import run as commands
from tfdpsq.data import train_vocabulary
from tfdpsq.layers import T5Config
from tfdpsq.privacy import PrivacySpec, make_optimizer, make_plan, optimizers
from tfdpsq.run import finetune, grid, overlap, pipeline, train_retriever
from tfdpsq.run.core import acting, layout, pipeline_checks, settings
from tfdpsq.run.training import grid_points, plain_training, training_settings
from tfdpsq.validation import InputError

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = {
    entry.name: importlib.import_module(f"{commands.__name__}.{entry.name}")
    for entry in pkgutil.iter_modules(commands.__path__)
    if not entry.ispkg and not entry.name.startswith("_")
}
RULES = [
    (name, rule)
    for name, module in sorted(STAGES.items())
    for rule in getattr(module, "ACTING", ())
]


def _changed(declared):
    """Another value that a declared setting takes, or None where there is no other."""
    default = declared.default
    candidates = [getattr(declared, "low", None), getattr(declared, "high", None)]
    candidates += [*getattr(declared, "choices", ()), 0.5, 1, 2, 3, 0.25, True, False]
    candidates += ["other", "query", ("other",), (1,), (0.5,), ("own_document",)]
    for value in candidates:
        try:
            declared.check("setting", value)
        except InputError:
            continue
        if value is not None and value != default and acting._plain(value) != default:
            return value
    return None


def _set(config, name, value):
    *path, last = name.split(".")
    node = config
    for part in path:
        node = node[part]
    with config.unlocked():
        node[last] = value


def _with_value(module, rule, acts):
    """The stage's config, in which a rule's settings act or do not."""
    config = module.default_config()
    for other in module.ACTING:  # or the other setting would be refused itself
        if other.covers(rule.setting) and other.values:
            _set(config, other.setting, other.values[0])
    declared = dict(_declared(module.SETTINGS))[rule.setting]
    if acts:
        value = rule.values[0] if rule.values else declared.default
        if not rule.values and not value:
            value = _changed(declared)
        if isinstance(declared, settings.Named):
            value = ml_collections.ConfigDict({"a": "b"})
    elif rule.values:
        others = (*declared.choices, "", "somewhere")
        value = next(v for v in others if v not in rule.values)
    else:
        value = type(declared.default)()
    _set(config, rule.setting, value)
    assert rule.holds(config) is acts
    return config


def _declared(declaration, before=""):
    for name, declared in declaration.items():
        if isinstance(declared, settings.Setting):
            yield before + name, declared
        else:
            yield from _declared(declared, f"{before}{name}.")


@pytest.mark.parametrize(
    "stage, rule", RULES, ids=[f"{name}-{rule.names}" for name, rule in RULES]
)
def test_a_changed_setting_without_effect_is_refused_by_its_stage(
    stage, rule, tmp_path, monkeypatch
):
    """Through the stage itself, which has looked at nothing else by then."""
    monkeypatch.chdir(tmp_path)
    module, tried = STAGES[stage], 0
    for name, declared in _declared(module.SETTINGS):
        value = _changed(declared)
        if not rule.covers(name) or name == rule.setting or value is None:
            continue
        config = _with_value(module, rule, acts=False)
        _set(config, name, value)
        with pytest.raises(InputError) as raised:
            module.run(config, tmp_path / "private" / "out")
        text = str(raised.value)
        # A value may break another rule as well; all name the setting.
        assert text.startswith(f"{name} is "), text
        assert "which does nothing here" in text and len(text) < 400, text
        config = _with_value(module, rule, acts=True)
        _set(config, name, value)
        acting.require_acting(config, module.SETTINGS, [rule])
        tried += 1
    assert tried and list(tmp_path.iterdir()) == []


def test_every_rule_names_settings_that_there_are():
    for stage, rule in RULES:
        names = [name for name, _ in _declared(STAGES[stage].SETTINGS)]
        assert rule.setting in names
        for each in rule.names.split():
            alone = acting.Only(each, rule.setting)
            assert any(alone.covers(name) for name in names), (stage, each)


def test_defaults_are_never_refused():
    for module in STAGES.values():
        if hasattr(module, "ACTING"):
            acting.require_acting(
                module.default_config(), module.SETTINGS, module.ACTING
            )
    pipeline.require_acting(pipeline.default_config())


@pytest.mark.parametrize("stage", sorted(pipeline.FILLED))
def test_what_a_job_fills_in_is_refused_where_it_is_set(stage):
    for name in pipeline.FILLED[stage].split():
        config = pipeline.default_config()
        declared = dict(_declared(pipeline.SETTINGS[stage]))[name]
        value = _changed(declared)
        if isinstance(declared, settings.Named):
            value = ml_collections.ConfigDict({"a": "b"})
        _set(config, f"{stage}.{name}", value)
        with pytest.raises(InputError, match=rf"^{stage}\.{name} is .*fills it in"):
            pipeline.require_acting(config)


def test_steps_that_another_row_decides_are_refused():
    config = pipeline.default_config()
    config.direct.steps = 7
    with pytest.raises(InputError, match="direct.steps is 7, which does nothing"):
        pipeline.require_acting(config)
    config.retriever.steps = 7
    pipeline.require_acting(config)


def test_a_job_without_rows_of_rerankers_sets_none_of_their_settings():
    """The notebooks run such a job, and `evaluate` would refuse the settings."""
    config, one = pipeline.default_config(), pipeline_checks.RERANKED + "_public_only"
    own = config.evaluate.rerank.to_dict()
    assert pipeline_checks.reranking_settings(config, "public", []) == own
    config.fit_rerank = True
    found = pipeline_checks.reranking_settings(config, "public", [one])
    assert (found["baseline"], found["fit"]) == (one, "public")


def test_settings_of_reranking_are_refused_where_nothing_reranks():
    """A job without a generator took them until its last stage refused them."""
    config = pipeline.default_config()
    config.epsilons, config.init, config.pretrain.steps = (), "", 0
    pipeline.require_acting(config)
    config.fit_rerank = True
    with pytest.raises(InputError, match="fit_rerank is True, which does nothing"):
        pipeline.require_acting(config)
    config.fit_rerank, config.evaluate.rerank.depth = False, 7
    with pytest.raises(InputError, match="evaluate.rerank.depth is 7, which does noth"):
        pipeline.require_acting(config)
    config.epsilons = (8.0,)
    pipeline.require_acting(config)
    config.rerank, config.fit_rerank = False, True
    config.evaluate.rerank.depth = 20
    with pytest.raises(InputError, match="as rerank is False"):
        pipeline.require_acting(config)


def test_the_shipped_configs_hold_nothing_without_effect():
    pipeline.require_acting(
        runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
    )
    rows = runpy.run_path(str(ROOT / "configs" / "paper" / "retrieval.py"))
    for row in rows["ROWS"]:
        pipeline.require_acting(rows["get_config"](row))
    for name in ("grid", "grid_retriever"):
        made = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"]()
        module = STAGES[made.stage]
        acting.require_acting(made, grid.SETTINGS, grid.ACTING)
        for point in grid_points.points_of(made, made.stage):
            acting.require_acting(point.stage, module.SETTINGS, module.ACTING)


def test_a_shape_that_the_weights_do_not_have_is_refused():
    config = train_retriever.default_config()
    config.init = "somewhere"
    shape = T5Config(330, 1, 2, 16, 24, 8, "1.0", dropout=0.1)
    declared = train_retriever.SETTINGS["t5"]
    acting.require_shape(config, declared, shape)
    config.t5.num_layers = 1  # what it has
    acting.require_shape(config, declared, shape)
    config.t5.num_heads = 3
    with pytest.raises(InputError, match="t5.num_heads is 3, but the T5 in init"):
        acting.require_shape(config, declared, shape)


def test_settings_of_tfds_are_refused_for_files(tmp_path):
    for name, value in (("corpus_split", "test"), ("data_dir", "x")):
        config = overlap.default_config()
        config.corpus = ("some.txt",)
        config[name] = value
        with pytest.raises(InputError, match=f"{name} is .*names a TFDS set"):
            overlap.run(config, tmp_path / "private" / "out")


def test_users_are_refused_where_nobody_is_protected(tmp_path):
    config = _tiny.config(train_retriever, unit="user", n_is_public=True)
    with pytest.raises(InputError, match="'plain' protects nobody"):
        train_retriever.run(config, tmp_path / "private" / "out")


def _plain_step(optimizer):
    """The weights before and after a plain step, and their gradients."""
    tf.keras.utils.set_random_seed(5)
    model = retriever.TwoTower(
        retriever.RetrieverConfig(
            t5=T5Config(64, 1, 2, 16, 24, 8, "1.0", dropout=0.0),
            embedding_dim=8,
            scale=5.0,
            query_length=6,
            document_length=8,
        )
    )
    random = np.random.default_rng(2)
    batch = {"weights": np.ones(4, np.float32)}
    for text, length in (("query", 6), ("document", 8)):
        batch[f"{text}_ids"] = random.integers(3, 64, [4, length]).astype(np.int32)
        batch[f"{text}_lengths"] = np.full(4, length, np.int32)
    batch["document_key"] = np.arange(4, dtype=np.int64)
    batch["positive_keys"] = np.full([4, 1], -1, np.int64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model.per_example_losses(batch, training=True))
    variables = model.trainable_variables
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
    before = [v.numpy() for v in variables]
    step = plain_training.make_step(model, 0.1, optimizer=optimizer)
    assert step(batch) == pytest.approx(float(loss), rel=1e-5)
    return before, [v.numpy() for v in variables], gradients


@pytest.mark.parametrize("optimizer", sorted(optimizers.OPTIMIZERS))
def test_the_optimizer_of_plain_training_is_the_one_that_was_named(optimizer):
    """It was Adam whatever was named. The steps are compared with Keras's own."""
    before, after, gradients = _plain_step(optimizer)
    variables = [tf.Variable(value) for value in before]
    theirs = optimizers.OPTIMIZERS[optimizer](0.1)
    theirs.apply_gradients(zip(gradients, variables))
    moved = 0.0
    for start, ours, other in zip(before, after, variables):
        np.testing.assert_allclose(ours, other.numpy(), rtol=1e-3, atol=1e-4)
        moved += float(np.abs(ours - start).sum())
    assert moved > 0.1


# Of T5X's Adafactor: another value each, and what the optimizer then has.
T5X = {
    "factored": (False, False),
    "multiply_by_parameter_scale": (False, False),
    "beta1": (0.5, 0.5),
    "decay_rate": (0.7, 0.7),
    "clipping_threshold": (0.0, None),
    "weight_decay_rate": (0.01, 0.01),
    "min_dim_size_to_factor": (4, 4),
    "epsilon1": (1e-20, 1e-20),
    "epsilon2": (0.5, 0.5),
}


def test_the_settings_of_t5xs_adafactor_are_the_optimizers():
    plan = make_plan(PrivacySpec(8.0, 0.1, 40, 8, 3))
    config = finetune.default_config()
    assert set(config.t5x_adafactor) == set(T5X)
    assert training_settings.optimizer_options(config) == {}
    config.optimizer = "t5x_adafactor"

    def found():
        settings.check(config, finetune.SETTINGS)
        options = training_settings.optimizer_options(config)
        return make_optimizer(plan, 0.1, config.optimizer, **options).get_config()

    defaults = optimizers.OPTIMIZERS["t5x_adafactor"]().get_config()
    assert {name: found()[name] for name in T5X} == {n: defaults[n] for n in T5X}
    for name, (given, taken) in T5X.items():
        config.t5x_adafactor[name] = given
        assert found()[name] == taken != defaults[name], name


# Of plain training: another value each, of which the weights must tell.
CHANGES = {
    "split": "dev",
    "unit": "pair",
    "trained": ("*projection*",),
    "embedding_dim": 12,
    "scale": 5.0,
    "learned_scale": True,
    "shared": False,
    "pooling": "first",
    "bidirectional": True,
    "document_length": 12,
    "query_length": 5,
    "batch_size": 6,
    "steps": 3,
    "optimizer": "sgd",
    "learning_rate": 1e-2,
    "schedule": "cosine",
    "dtype": "mixed_bfloat16",
    "seed": 1,
    "t5.num_layers": 2,
    "t5.vocabulary_size": 340,
    "t5.num_heads": 4,
    "t5.hidden_dim": 24,
    "t5.intermediate_dim": 40,
    "t5.key_value_dim": 16,
    "t5.version": "1.1",
    "t5.dropout": 0.3,
}
# What the weights do not tell of, and why.
WITHOUT_TRACE = {
    "pairs": "what is trained on",
    "vocabulary": "what is trained on",
    "init": "the weights to start from",
    "method": "tests/run/test_direct_training.py",
    "epsilon": "refused with method 'plain'",
    "n_is_public": "refused where False",
    "strict": "the losses that are shown",
    "epochs": "tests/run/test_epochs.py",
    "save_every": "how often a curve is written",
    "private_directory": "a place",
    "rows_at_a_time": "memory",
    "jit_compile": "speed",
}


def test_every_setting_of_plain_training_is_refused_or_in_one_of_the_tables():
    left = {
        name
        for name, _ in _declared(train_retriever.SETTINGS)
        if not any(rule.covers(name) for rule in train_retriever.ACTING)
    }
    assert left | {"rows_at_a_time"} == {*CHANGES, *WITHOUT_TRACE}


@pytest.mark.slow
def test_every_setting_of_plain_training_acts(tmp_path):
    """Trains with each setting changed: `optimizer` was once Adam, whatever it said."""
    queries = _tiny.write_pairs(tmp_path / "pairs", train=16, dev=16, test=4)
    with open(tmp_path / "pairs" / "qrels" / "train.tsv", "a") as qrels:
        qrels.write("q0\td1\t1\n")
    train_vocabulary(queries, 320, tmp_path / "spiece.model")  # made-up queries

    def trained(number, name="seed", value=0):
        t5 = {"vocabulary_size": 330, "dropout": 0.1, "version": "1.0"}
        config = _tiny.config(
            train_retriever,
            t5={**_tiny.SHAPE, **t5},
            pairs=str(tmp_path / "pairs"),
            vocabulary=str(tmp_path / "spiece.model"),
            document_length=24,
            query_length=10,
            embedding_dim=8,
            batch_size=4,
            steps=4,
            n_is_public=True,
        )
        _set(config, name, value)
        out = tmp_path / "private" / f"{number}"
        train_retriever.run(config, out)
        model = retriever.load(out / layout.RETRIEVER_MODEL)
        return [(v.name.split("/")[-1], v.numpy()) for v in model.variables]

    first, again = trained("first"), trained("again")
    assert _equal(first, again)  # so that a difference is the setting's
    for number, (name, value) in enumerate(CHANGES.items()):
        assert not _equal(first, trained(number, name, value)), name


def _equal(one, other):
    return len(one) == len(other) and all(
        a.shape == b.shape and np.array_equal(a, b)
        for (_, a), (_, b) in zip(one, other)
    )


def test_the_tiny_job_of_the_tests_holds_nothing_without_effect(tmp_path):
    pipeline.require_acting(_tiny.tiny_config(tmp_path))
