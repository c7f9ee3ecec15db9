"""The paper's tables 3 to 7, made anew: every row, ours beside the published number.

    python -m tfdpsq.run.reproduce --table=3 --scale=tiny

`--table` takes several, or "all"; rows that tables share are made once. `--scale` names
what `configs/paper/tables.py` holds: "tiny" is offline and for two cores, "paper" needs
MS MARCO, the BEIR sets and machines (`--config.job.data=`, `--config.zero_shot.root=`).
`--workdir` is where everything goes, by default a directory of the scale in the
temporary one. Interrupted, the same command goes on.

Writes `tables.json` and `tables.html`: numbers, Kendall's τ between the two orderings
of the rows, and of each ordering that the paper reports whether it holds here, and if
not, why. They are computed from private queries and are not to be released.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import ml_collections
from absl import flags

from tfdpsq import validation
from tfdpsq.run import pipeline, zero_shot
from tfdpsq.run.core import command, pipeline_checks, workdir
from tfdpsq.run.reproduction import reproduce_numbers, reproduce_report, reproduce_rows

CONFIG = pathlib.Path("configs", "paper", "tables.py")


def default_config() -> ml_collections.ConfigDict:
    """The settings: a job, the sizes of T5, and the tables.

    `job` is the pipeline's, of which `init`, `epsilons` and `direct_epsilons` are not
    read, but from `sizes` and the rows: a size is {"init": T5} or what `pretrain`'s
    `resize` takes, made from `job.init` and trained by `job.pretrain`. Retrievers
    start from `retriever_size`. Every row is made once for each of `seeds`.
    With `held_out_packages` the data are pydocs without these, and each is a set of
    the zero-shot table. `audit` says how generators are trained on canaries: settings
    of `job.finetune` that are other ones then, where neither 0 nor "".
    """
    return ml_collections.ConfigDict(
        {
            "job": pipeline.default_config(),
            "sizes": {"base": {}},
            "retriever_size": "base",
            "seeds": (0,),
            "held_out_packages": (),
            "zero_shot": zero_shot.default_config(),
            "audit": {"unit": "", "steps": 0, "batch_size": 0, "query_length": 0},
            "tables": {},
            "resamples": 10_000,
        }
    )


def run(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    tables: Sequence[str] = (),
) -> dict[str, Any]:
    """Makes what the tables need and is not there, and compares.

    Args:
      config: the settings.
      directory: the workdir.
      tables: names out of `config.tables`; none takes all.

    Returns:
      What `tables.json` holds.

    Raises:
      InputError: an unknown table, bad settings or data; before any training where
        they can be told.
    """
    started = time.monotonic()
    names = list(tables) or list(config.tables)
    for name in names:
        validation.one_of("table", name, tuple(config.tables))
    wanted = {name: config.tables[name].to_dict() for name in names}
    for table in wanted.values():
        for name in (*table["paper"], *table["controls"]):
            size = reproduce_rows.row_of(name).size
            if size:
                validation.one_of(
                    f"the size of row {name!r}", size, tuple(config.sizes)
                )
    pipeline_checks.check_settings(config.job)
    directory = workdir.open_workdir(directory, config)
    rows = reproduce_rows.Rows(config, directory)
    results = reproduce_numbers.compare(config, rows, wanted)
    results["seconds_now"] = round(time.monotonic() - started, 1)
    results["seconds"] = dict(rows.stages.seconds)
    reproduce_report.write(directory, results)
    sys.stdout.write(
        f"\n{reproduce_report.as_text(results)}\n\n{directory / 'tables.html'}\n"
    )
    return results


def _default_flags(words: list[str]) -> list[str]:
    """The command line with config and workdir of the scale, where it has none."""
    own = flags.FlagValues()
    flags.DEFINE_string("scale", "tiny", "", flag_values=own)
    flags.DEFINE_string("config", "", "", flag_values=own)
    flags.DEFINE_string("workdir", "", "", flag_values=own)
    own(words, known_only=True)
    if not own.config:
        beside = pathlib.Path(__file__).resolve().parents[2] / CONFIG
        path = CONFIG if CONFIG.is_file() else beside
        if not path.is_file():
            raise validation.InputError(
                f"{CONFIG} is not there. Run this in a checkout of tfdpsq, or give "
                "--config=FILE:SCALE."
            )
        words = [*words, f"--config={path}:{own.scale}"]
    if not own.workdir and own.scale == "tiny":
        out = pathlib.Path(tempfile.gettempdir()) / "tfdpsq-reproduce-tiny"
        words = [*words, f"--workdir={out}"]
    return words


def main() -> None:
    """Parses the flags and runs."""
    flags.DEFINE_string("scale", "tiny", "What configs/paper/tables.py holds.")
    table = flags.DEFINE_list("table", [], "Such as 3, or 3,4; all by default.")
    try:
        sys.argv = _default_flags(sys.argv)
    except validation.InputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)

    def asked(config: ml_collections.ConfigDict, directory: pathlib.Path) -> None:
        names = [] if table.value == ["all"] else table.value
        run(config, directory, names)

    command.main(asked)


if __name__ == "__main__":
    main()
