"""Settings: one test of each kind, and every setting acts or is refused.

That a command refuses them in one sentence is in `test_bad_inputs`.
"""

import dataclasses
import fractions
import importlib.util
import math
import pathlib

import numpy as np
import pytest

from tfdpsq.run import command
from tfdpsq.run.common.kinds import Corpus, Pairs
from tfdpsq.run.frame import settings
from tfdpsq.run.frame.settings import Rule, nested, path, setting
from tfdpsq.validation import InputError

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = [name for name in command.names() if name not in ("verify", "status")]


def _of(default, **rule):
    field = ("x", type(default), setting(default, **rule))
    base = (settings.Settings,)
    return dataclasses.make_dataclass("One", [field], bases=base, frozen=True)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (_of(3, ge=1, le=5), [1, 5, np.int64(3)], [0, 6, -1, 2.0, True, "3", None]),
        (_of(2, ge=2, zero=True), [0, 2], [1, -1]),
        (
            _of(0.5, gt=0, le=1e3),
            [1, 1e-3, 1e3, np.float32(0.1), fractions.Fraction(1, 2)],
            [0.0, -1.0, 1e4, math.nan, math.inf, np.float32(math.nan), True, "1", None],
        ),
        (_of(0.5, ge=0, lt=1), [0, 0.99], [1.0, -0.1]),
        (_of(1.0, ge=0, inf=True), [math.inf, "inf"], [-math.inf, "x"]),
        (_of(False), [True, False], [1, 0, "True", None]),
        (_of("a", choices=("a", "b")), ["b"], ["c", "", 1, True, None]),
        (_of("a"), ["", "anything"], [1, None, ["a"]]),
        (
            _of((1, 2), of=Rule(ge=1)),
            [(), [3], (4, 5)],
            [1, (0,), ("1",), (1.5,), None],
        ),
        (
            _of({"a": 1.0}, of=Rule(gt=0.0)),
            [{}, {"b": 2}],
            [[1], {"a": 0}, {"a": "x"}],
        ),
    ],
)
def test_kind_of_setting_takes_what_is_in_range_and_names_itself(kind, good, bad):
    default = kind().x
    for value in good:
        found = kind(value).x
        assert type(found) is type(default)
        assert not isinstance(found, float) or found == float(value)
    for value in bad:
        with pytest.raises(InputError, match=r"^x(\[0\]|\.a)? is "):
            kind(value)


@dataclasses.dataclass(frozen=True)
class _Inner(settings.Settings):
    epsilon: float = setting(8.0, gt=0, inf=True)
    pairs: str = path(Pairs)
    kind: str = setting("a", choices=("a", "b"))
    of_b: int = setting(1, ge=1, when={"kind": ("b",)})
    corpus: str = path(Corpus, "", when={"kind": ("b",)})


@dataclasses.dataclass(frozen=True)
class _Outer(settings.Settings):
    train: _Inner = nested(_Inner, filled=("pairs",), epsilon=3.0)
    systems: dict = path(Pairs, {"a": "here"})
    rows: int = setting(2, ge=1, speed=True)


def test_nested_settings_come_from_a_config_and_are_named_by_their_place():
    config = settings.config_of(_Outer)
    assert config.train.epsilon == 3.0
    config.systems = {"b": "there"}
    given = {**config.to_dict(), "train": {"epsilon": "inf"}}
    made = settings.from_config(_Outer, given)
    assert made.train.epsilon == math.inf and made.systems == {"b": "there"}
    assert settings.from_config(_Outer, {"train": {"kind": "b"}}).train.epsilon == 3.0
    for change, message in (
        ({"train": {"epsilon": -1}}, r"^train\.epsilon is -1; it must be a number abo"),
        (
            {"train": {"epsilo": 1}},
            r"setting train\.epsilo. Did you mean train",
        ),
        ({"epsilon": 1}, r"no setting epsilon. Did you mean train\.epsilon\?"),
        ({"train": {"pairs": "x"}}, r"train\.pairs is 'x', which this command sets"),
        ({"train": {"of_b": 2}}, r"train\.of_b is 2, which does nothing where kind is"),
        ({"train": {"corpus": "x"}}, r"train\.corpus is 'x', which does nothing"),
    ):
        with pytest.raises(InputError, match=message):
            settings.from_config(_Outer, change)


def test_result_depends_neither_on_speed_nor_on_paths_nor_on_what_is_idle():
    made = settings.from_config(_Outer, {})
    assert settings.identity(made) == {
        "train": {"epsilon": 3.0, "kind": "a"},
        "systems": ["a"],
    }
    paths = {name: value for name, value, _ in settings.paths_of(made)}
    assert paths == {"train.pairs": "", "systems": {"a": "here"}}


@pytest.mark.parametrize("name", STAGES)
def test_defaults_of_a_stage_are_sound_and_shown(name):
    made = command.stage(name).Settings()
    config = settings.config_of(made)
    assert settings.from_config(type(made), config) == made
    shown = {line.partition("=")[0] for line in settings.help_lines(made)}
    assert shown <= set(settings.all_names(type(made)))
    assert all(line.partition("=")[2] for line in settings.help_lines(made))


@pytest.mark.parametrize("file", sorted(p.stem for p in ROOT.glob("configs/*.py")))
def test_shipped_config_is_sound_and_has_nothing_without_effect(file):
    config, _ = command.load(str(ROOT / "configs" / f"{file}.py"))
    spec = importlib.util.find_spec(f"tfdpsq.run.stages.{file}")
    names = [file] if spec else ["pipeline", "finetune", "reproduce", "pretrain"]
    failed = []
    if "adapter_epsilons" in config:  # made before the job
        config.embeddings = "given"
    for name in names:
        try:
            settings.from_config(command.stage(name).Settings, config)
        except InputError as error:
            failed.append(str(error))
    assert len(failed) < len(names), failed


@pytest.mark.parametrize(
    ("data", "documents", "pairs", "sizes"),
    [
        ("pydocs", 22_726, 18_475, (512, 3072, 8192, 1, 0)),  # README's measurements
        ("squadshifts", 5_664, 20_998, (512, 3072, 5664, 1, 500)),
        ("cut", 300, 1_000, (500, 500, 300, 21, 75)),
        ("log", 10**7, 10**6, (512, 3072, 8192, 1, 500)),
    ],
)
def test_sizes_of_quickstart_follow_the_data(data, documents, pairs, sizes):
    config, fit = command.load(str(ROOT / "configs" / "quickstart.py"))
    config.data = data
    before = config.to_dict()
    with pytest.raises(InputError, match="data is .*, with 20 pairs to train on"):
        fit(config, documents, 20)
    assert set(fit(config, documents, pairs)) <= set(STAGES)
    direct = config.direct
    found = config.finetune.batch_size, direct.batch_size, direct.negatives
    found += config.synthesize.samples_per_document, config.pretrain.steps
    assert found == sizes
    assert (config.to_dict() == before) == (data == "pydocs")
