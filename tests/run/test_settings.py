"""Every setting of every stage: declared once, bad values refused before any read."""

import ast
import fractions
import importlib
import json
import math
import pathlib
import pkgutil

import ml_collections
import numpy as np
import pytest

from tfdpsq import run as commands
from tfdpsq import validation
from tfdpsq.run import finetune, grid, pipeline
from tfdpsq.run.core import config_file, settings, workdir
from tfdpsq.run.training import grid_points

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = {
    entry.name: importlib.import_module(f"{commands.__name__}.{entry.name}")
    for entry in pkgutil.iter_modules(commands.__path__)
    if not entry.ispkg and not entry.name.startswith("_")
}
STAGES = {name: module for name, module in STAGES.items() if hasattr(module, "run")}
STAGES = {n: m for n, m in STAGES.items() if hasattr(m, "default_config")}
# Their settings are those of other stages, under the stage's name.
_JOBS = ("pipeline", "reproduce")
BAD = (math.nan, math.inf, -math.inf, -1, -1.0, 0, True, "string", None, (), 1e300)
BAD += (2**70, 10**5000, np.float32(math.nan), "x" * 10_000)


def _leaves(declaration, before=""):
    for name, declared in declaration.items():
        if isinstance(declared, settings.Setting):
            yield before + name, declared
        else:
            yield from _leaves(declared, f"{before}{name}.")


def _with(module, name, value):
    """The stage's default config with one value, whatever its type."""
    (config,) = _each_with(module, name, [value])
    return config


def _each_with(module, name, values):
    """The stage's default config, made once, with each of the values in turn."""
    plain = module.default_config().to_dict()
    *path, last = name.split(".")
    node = plain
    for part in path:
        node = node[part]
    for value in values:
        node[last] = value
        yield ml_collections.ConfigDict(plain)


def test_every_stage_with_a_config_declares_it():
    assert len(STAGES) == 22
    for name, module in STAGES.items():
        assert module.default_config() == settings.default_config(module.SETTINGS), name
        settings.check(module.default_config(), module.SETTINGS)
        for leaf, declared in _leaves(module.SETTINGS):
            declared.check(leaf, declared.default)


def _allowed(declared, value):
    """Whether a number is in the declared range, by a rule of the test's own."""
    if value is None or isinstance(value, (bool, str, tuple)):
        return declared.__class__ is settings.Number and (
            declared.infinite and value == "inf"
        )
    if isinstance(declared, settings.Integer):
        whole = isinstance(value, int)
        off = declared.zero and value == 0
        return whole and (off or declared.low <= value <= declared.high)
    if value == math.inf:
        return declared.infinite or declared.high == math.inf
    if declared.zero and value == 0:
        return True
    if value != value or not declared.low <= value <= declared.high:
        return False
    at_low = declared.low_open and value == declared.low
    return not at_low and not (declared.high_open and value == declared.high)


@pytest.mark.parametrize("stage", STAGES)
def test_bad_numbers_are_refused_by_the_name_the_user_wrote(
    stage, tmp_path, monkeypatch
):
    """Through the stage itself: it must check before it looks at anything else."""
    monkeypatch.chdir(tmp_path)
    module, tried = STAGES[stage], 0
    for name, declared in _leaves(module.SETTINGS):
        if not isinstance(declared, (settings.Integer, settings.Number)):
            continue
        allowed = [value for value in BAD if _allowed(declared, value)]
        for value in allowed:
            declared.check(name, value)
        refused = [value for value in BAD if not _allowed(declared, value)]
        if stage in _JOBS and "." in name:  # tried whole at the stage that it is of
            refused = refused[:2]
        for config in _each_with(module, name, refused):
            with pytest.raises(validation.InputError) as raised:
                module.run(config, tmp_path / "private" / "out")
            text = str(raised.value)
            assert text.startswith(f"{name} is "), text
            assert "it must " in text and len(text) < 400, text
            tried += 1
    assert tried > 10 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", STAGES)
def test_other_settings_refuse_another_type(stage, tmp_path):
    module = STAGES[stage]
    for name, declared in _leaves(module.SETTINGS):
        wrong = [1.5, None]
        if not isinstance(declared, settings.Flag):
            wrong.append(True)
        if isinstance(declared, settings.Text):
            wrong += ["a\0b", "x" * 5000]
        if isinstance(declared, (settings.Integer, settings.Number)):
            continue
        for config in _each_with(module, name, wrong):
            with pytest.raises(validation.InputError) as raised:
                module.run(config, tmp_path / "out")
            assert str(raised.value).startswith((f"{name} is ", f"{name}[")), name
    assert list(tmp_path.iterdir()) == []


def test_a_pipelines_settings_are_named_with_their_stage():
    config = pipeline.default_config()
    config.finetune.learning_rate = math.nan
    with pytest.raises(validation.InputError, match="^finetune.learning_rate is nan"):
        settings.check(config, pipeline.SETTINGS)


def test_numbers_of_numpy_are_numbers():
    config = _with(finetune, "steps", np.int64(3))
    config = ml_collections.ConfigDict({**config, "learning_rate": np.float32(0.1)})
    settings.check(config, finetune.SETTINGS)
    settings.check(_with(finetune, "learning_rate", 1), finetune.SETTINGS)
    settings.check(_with(finetune, "epsilon", "inf"), finetune.SETTINGS)


def test_missing_and_unknown_settings_are_named():
    plain = finetune.default_config().to_dict()
    del plain["t5"]["dropout"]
    with pytest.raises(validation.InputError, match="no setting t5.dropout"):
        settings.check(plain, finetune.SETTINGS)
    plain = finetune.default_config().to_dict()
    plain["lora"]["rang"] = 3
    with pytest.raises(validation.InputError, match="'lora.rang'. Did you mean 'lora."):
        settings.check(plain, finetune.SETTINGS)
    plain = {**finetune.default_config().to_dict(), "t5": 3}
    with pytest.raises(validation.InputError, match="^t5 is 3; it must be a mapping"):
        settings.check(plain, finetune.SETTINGS)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("learning_rate", "axes is 'learning_rate'"),
        ((("learning_rate",),), r"axes\[0\] is \('learning_rate',\)"),
        ((("learning_rate", 3),), r"axes\[0\] is"),
        ((("learning_rate", ()),), r"axes\[0\] is"),
        (((1, (2,)),), r"axes\[0\] is"),
    ],
)
def test_axes_are_pairs_of_a_setting_and_values(axes, said):
    with pytest.raises(validation.InputError, match=said):
        grid_points.check_axes("axes", axes)


def test_an_axis_of_a_group_of_settings_is_refused_by_its_name():
    config = grid.default_config()
    with config.unlocked():
        config.axes = (("lora", ({"rank": 2}, {"rank": 4})),)
    with pytest.raises(validation.InputError, match="sets 'lora' to .*'lora.alpha'"):
        list(grid_points.points_of(config, config.stage))


@pytest.mark.parametrize("variants", [(), {"a/b": {}}, {"": {}}, {"a": 3}, "all"])
def test_variants_are_named_like_files(variants):
    with pytest.raises(validation.InputError, match="variants"):
        grid_points.check_variants("variants", variants)


@pytest.mark.parametrize("stage", ["grid", "choose"])
def test_a_point_of_a_grid_is_checked_as_its_stage_is(stage, tmp_path):
    module = STAGES[stage]
    config = module.default_config()
    config.axes = (("learning_rate", (1e-3, math.nan)),)
    with pytest.raises(validation.InputError, match=r"learning_rate is nan"):
        module.run(config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# -- The configs that come with the project ------------------------------------------

_ROWS = {"retrieval.py": ("original", "synthetic-base-eps8", "direct-eps3")}
_ROWS["tables.py"] = ("tiny", "paper")
CONFIGS = [
    f"{path.relative_to(ROOT)}{row and ':' + row}"
    for path in sorted((ROOT / "configs").rglob("*.py"))
    for row in _ROWS.get(path.name, ("",))
    if path.name != "notebooks.py"
]


def _stage_named_in(path):
    text = path.read_text("utf-8")
    text = text.replace("from tfdpsq import ", "")
    return [n for n in STAGES if f"tfdpsq.run.{n} " in text or f"tfdpsq {n} " in text]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_is_of_the_stage_it_names(config):
    path = ROOT / config.partition(":")[0]
    (stage,) = set(_stage_named_in(path))
    loaded = config_file.load(str(ROOT / config))
    settings.check(loaded, STAGES[stage].SETTINGS)
    assert config_file.stage_of(loaded) == stage
    # A file that sets nothing need not exist: the stage runs without `--config`.
    assert loaded.to_dict() != STAGES[stage].default_config().to_dict()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.py")), ids=str)
def test_every_config_states_its_command_duration_and_result(path):
    header = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    place = path.relative_to(ROOT).as_posix()
    commands = [
        line for line in header.splitlines() if line.startswith("    python -m")
    ]
    named = [c for c in commands if f"--config={place}" in c or "reproduce" in c]
    assert named and all(f"tfdpsq.run.{_stage_named_in(path)[0]} " in c for c in named)
    for label in ("Duration: ", "Result: "):
        (line,) = [line for line in header.splitlines() if line.startswith(label)]
        assert len(line) > len(label) + 5


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["default", "small"])
def test_the_notebooks_config_is_a_pipelines(scale):
    loaded = config_file.load(str(ROOT / "configs" / f"notebooks.py:{scale}"))
    settings.check(loaded, pipeline.SETTINGS)


def test_numbers_of_any_kind_are_recorded_as_json():
    given = {
        "integer": np.int64(3),
        "float": np.float32(0.5),
        "fraction": fractions.Fraction(1, 4),
        "flag": np.bool_(True),
        "several": [np.uint8(2), (np.float64(math.inf),)],
        "true": True,
    }
    assert json.loads(json.dumps(workdir.plain(given))) == {
        "integer": 3,
        "float": 0.5,
        "fraction": 0.25,
        "flag": True,
        "several": [2, ["inf"]],
        "true": True,
    }
    assert workdir.plain(True) is True


def test_a_placeholder_without_a_value_is_named():
    config = finetune.default_config()
    config.steps = ml_collections.config_dict.required_placeholder(int)
    with pytest.raises(validation.InputError, match="steps has no value"):
        settings.check(config, finetune.SETTINGS)
