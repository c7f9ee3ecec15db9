"""Settings: one test of each kind, and every setting acts or is refused.

That a stage checks its settings before it reads anything is in `test_bad_inputs`, a few
rows for each stage.
"""

import fractions
import importlib
import math
import pathlib
import pkgutil

import numpy as np
import pytest

from tfdpsq import run as commands
from tfdpsq.layers import T5Config
from tfdpsq.run import finetune, pipeline, train_retriever
from tfdpsq.run.core import acting, config_file, settings
from tfdpsq.validation import InputError

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = {
    entry.name: importlib.import_module(f"{commands.__name__}.{entry.name}")
    for entry in pkgutil.iter_modules(commands.__path__)
    if not entry.ispkg and not entry.name.startswith("_")
}
STAGES = {n: m for n, m in STAGES.items() if hasattr(m, "SETTINGS")}


# -- Kinds ---------------------------------------------------------------------------


def _above_two(name, value):
    if value <= 2:
        raise InputError(f"{name} is {value}; it must be above 2.")


@pytest.mark.parametrize(
    ("declared", "good", "bad"),
    [
        (
            settings.Integer(3, 1, 5),
            [1, 5, np.int64(3)],
            [0, 6, -1, 2.0, True, "3", None, math.nan, 10**400],
        ),
        (settings.Integer(2, 2, zero=True), [0, 2], [1, -1]),
        (
            settings.Number(0.5, 0, 1e3, low_open=True),
            [1, 1e-3, 1e3, np.float32(0.1), fractions.Fraction(1, 2)],
            [0.0, -1.0, 1e4, math.nan, math.inf, np.float32(math.nan), True, "1", None],
        ),
        # As float32 it is 0: budget would be spent on nothing.
        (settings.Number(0.5, 0, low_open=True), [1e-18], [1e-19, 1e-300]),
        (settings.Number(0.5, 0, 1, high_open=True), [0, 0.99], [1.0, -0.1]),
        (settings.Number(1.0, 0, infinite=True), [math.inf, "inf"], [-math.inf, "x"]),
        (settings.Number(2.0, 1, zero=True), [0, 1], [0.5]),
        (settings.Flag(False), [True, False, np.bool_(True)], [1, 0, "True", None]),
        (settings.Text("a", ("a", "b")), ["b"], ["c", "", 1, True, None]),
        (
            settings.Text(""),
            ["", "a/path", "gs://bucket/ü"],
            ["a\0b", "x" * 5000, "\udcff", 1.5, None, True],
        ),
        (settings.Text("a", required=True), ["b"], [""]),
        (
            settings.Several((1,), settings.Integer(1), least=1),
            [(1, 2), [3]],
            [(), 1, "12", (0,), (1, math.nan)],
        ),
        (settings.Several((1, 2), settings.Integer(1), length=2), [(1, 1)], [(1,)]),
        (
            settings.Named({}, settings.Text("", required=True)),
            [{}, {"mine": "x"}],
            [{"mine": ""}, {"": "x"}, {1: "x"}, "mine", ()],
        ),
        (settings.Checked(3, _above_two), [3], [2]),
    ],
)
def test_kind_of_setting_takes_what_is_in_range_and_names_itself(declared, good, bad):
    for value in good:
        declared.check("part.size", value)
    for value in bad:
        with pytest.raises(InputError, match=r"^part\.size") as refused:
            declared.check("part.size", value)
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", STAGES)
def test_defaults_of_a_stage_are_allowed_and_act(name):
    module = STAGES[name]
    config = module.default_config()
    assert config == settings.default_config(module.SETTINGS)
    settings.check(config, module.SETTINGS)
    acting.require_acting(config, module.SETTINGS, getattr(module, "ACTING", ()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"t5": 3}, "^t5 is 3"),
        ({"t5": {}}, "no setting t5"),
        ({"lora": {"rang": 3}}, "'lora.rang'. Did you mean 'lora.rank'"),
        ({"learning_rate": math.nan}, "^learning_rate is nan"),
    ],
)
def test_missing_and_unknown_settings_are_named(change, match):
    with pytest.raises(InputError, match=match):
        plain = {**finetune.default_config().to_dict(), **change}
        settings.check(plain, finetune.SETTINGS)


_ROWS = {"retrieval.py": ("original", "direct-eps3"), "tables.py": ("tiny", "paper")}
_CONFIGS = [
    f"{path.relative_to(ROOT)}{row and ':' + row}"
    for path in sorted((ROOT / "configs").rglob("*.py"))
    for row in _ROWS.get(path.name, ("",))
    if path.name != "notebooks.py"
]


@pytest.mark.parametrize("name", _CONFIGS)
def test_shipped_config_is_valid_and_has_nothing_without_effect(name):
    config = config_file.load(str(ROOT / name))
    stage = config_file.stage_of(config)
    module = STAGES[stage]
    settings.check(config, module.SETTINGS)
    if name != "configs/pydocs.py":  # whose embeddings are given by a flag
        acting.require_acting(config, module.SETTINGS, getattr(module, "ACTING", ()))
    assert f"tfdpsq.run.{stage} " in (ROOT / name.partition(":")[0]).read_text()


# -- Settings that act only with another one -------------------------------------------

_DECLARED = {
    "kind": settings.Text("a", ("a", "b", "c")),
    "path": settings.Text(""),
    "size": settings.Integer(3),
    "deep": {
        "rank": settings.Integer(0, 0),
        "names": settings.Several((), settings.Text("")),
    },
}
_RULES = (
    acting.Only("size", "kind", ("b", "c")),
    acting.Only("deep.*", "path"),
)


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({}, ""),
        ({"size": 4}, "size"),
        ({"size": 4, "kind": "b"}, ""),
        ({"deep": {"rank": 1, "names": ()}}, "deep.rank"),
        ({"deep": {"rank": 0, "names": ("x",)}}, "deep.names"),
        ({"deep": {"rank": 1, "names": ()}, "path": "here"}, ""),
    ],
)
def test_changed_setting_without_effect_is_refused(changes, idle):
    config = settings.default_config(_DECLARED)
    config.update(changes)
    if not idle:
        acting.require_acting(config, _DECLARED, _RULES, "part")
        return
    with pytest.raises(InputError, match=rf"^part\.{idle} is .*does nothing"):
        acting.require_acting(config, _DECLARED, _RULES, "part")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("finetune.epsilon", 3.0),  # filled in by the job
        ("evaluate.private_directory", "/x"),
        ("direct.steps", 7),  # all rows are trained for the same
        ("log.seed", 1),  # there is no log
        ("histogram.rows_per_unit", 3),  # of users
    ],
)
def test_setting_that_a_job_decides_is_refused(name, value):
    config = pipeline.default_config()
    stage, _, last = name.partition(".")
    config[stage][last] = value
    with pytest.raises(InputError, match=f"^{name} is .*does nothing"):
        pipeline.require_acting(config)


def test_shape_that_the_weights_do_not_have_is_refused():
    config = train_retriever.default_config()
    config.init = "somewhere"
    shape = T5Config(330, 1, 2, 16, 24, 8, "1.0", dropout=0.1)
    declared = train_retriever.SETTINGS["t5"]
    config.t5.num_layers = 1  # what it has
    acting.require_shape(config, declared, shape)
    config.t5.num_heads = 3
    with pytest.raises(InputError, match="t5.num_heads is 3"):
        acting.require_shape(config, declared, shape)
