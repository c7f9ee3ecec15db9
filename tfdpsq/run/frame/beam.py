"""Makes the shards of a pass on Apache Beam. Imported only for `--beam`.

Each element is a shard's number; a worker loads the models once, and makes shards as a
single process does. The command that started the pipeline merges them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

import apache_beam
from apache_beam.options import pipeline_options
from apache_beam.runners.portability import fn_api_runner
from apache_beam.utils import shared

from tfdpsq import validation
from tfdpsq.run.frame import runner, shards


class MakeShardFn(apache_beam.DoFn):
    """Makes the shard of each number; yields the number."""

    def __init__(
        self, stage: runner.ShardedStage, c: runner.Context, made: shards.Shards
    ):
        """Loads nothing yet: the function is pickled and sent to workers."""
        self._stage, self._c, self._shards = stage, c, made
        self._shared = shared.Shared()

    def setup(self) -> None:
        """Loads the models, once per process, whatever its number of threads."""
        self._make = self._shared.acquire(lambda: self._stage.start(self._c))

    def process(self, element: int) -> Iterator[int]:
        """Makes a shard."""
        shards.make_one(self._make, self._shards, element, self._c.place)
        yield element


def run(
    stage: runner.ShardedStage,
    c: runner.Context,
    made: shards.Shards,
    flags: Sequence[str],
) -> None:
    """Makes the missing shards by the workers of a runner, and waits for them.

    Each worker has one device, and must reach the directory of `made`. The flags are
    Beam's own, such as `--runner=DataflowRunner --region=...`.

    Raises:
      InputError: a worker raised one, or shards are missing in the end.
    """
    options = pipeline_options.PipelineOptions(list(flags))
    name = options.view_as(pipeline_options.StandardOptions).runner
    local = name in (None, "DirectRunner", "FnApiRunner")
    # Beam's default downloads another, which ignores --direct_num_workers.
    of_beam = fn_api_runner.FnApiRunner() if local else name
    pipeline = apache_beam.Pipeline(runner=of_beam, options=options)
    _ = (
        pipeline
        | "Shards" >> apache_beam.Create(made.missing())
        | "Spread" >> apache_beam.Reshuffle()
        | "Make"
        >> apache_beam.ParDo(
            MakeShardFn(stage, dataclasses.replace(c, devices=None), made)
        )
    )
    try:
        pipeline.run().wait_until_finish()
    except Exception as error:
        # A worker's error arrives as text.
        text = re.sub(r" \[while running .*", "", str(error))
        text = f"{type(error).__name__}: {text}"  # of a thread of this process
        messages = re.findall(r"(?:InputError|DataError): (.+)", text)
        if not messages:
            raise
        raise validation.InputError(messages[-1]) from error
    if made.missing():
        raise validation.InputError(
            f"Beam's workers left {len(made.missing())} shards out of {made.directory}."
            " Give a workdir that they share with this command."
        )
