"""The shards of a pass as the elements of an Apache Beam pipeline.

Imported only where Beam is asked for. Every element is a shard's number; a worker loads
the models once and does for each number what any other process would do, so the shards
are the same. The command that started the pipeline merges them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import apache_beam
from absl import logging
from apache_beam.options import pipeline_options
from apache_beam.runners.portability import fn_api_runner
from apache_beam.utils import shared

from tfdpsq import validation
from tfdpsq.data.shards import ShardDirectory
from tfdpsq.run import passes

_LOCAL = (None, "DirectRunner", "FnApiRunner")


class MakeShardFn(apache_beam.DoFn):
    """Makes the shard of the number it is given; yields the number."""

    def __init__(self, shards: ShardDirectory, work: passes.Work):
        """Loads nothing yet: it is pickled, and sent to workers.

        Args:
          shards: where they go.
          work: what is done.
        """
        self._shards, self._work = shards, work
        self._shared = shared.Shared()

    def setup(self) -> None:
        """Loads the models, once in a process however many threads it has."""
        self._maker = self._shared.acquire(self._loaded)

    def process(self, element: int) -> Iterator[int]:
        """Makes a shard; see `passes.Maker.make`."""
        self._maker.make(element, wait=True)
        yield element

    def _loaded(self) -> passes.Maker:
        maker = passes.Maker(self._shards, self._work)
        maker.load()
        return maker


def run(
    shards: ShardDirectory,
    work: passes.Work,
    indices: Iterable[int],
    flags: Sequence[str],
) -> None:
    """Makes shards by the workers of a Beam runner, and waits for them.

    Args:
      shards: where they go: a place that all workers see.
      work: what is done.
      indices: which shards.
      flags: Beam's own, such as `--runner=DataflowRunner --region=...`.

    Raises:
      InputError: a worker raised one.
    """
    logging.info("%s: flags for Beam: %s", work.name, " ".join(flags) or "none")
    options = pipeline_options.PipelineOptions(list(flags))
    runner = options.view_as(pipeline_options.StandardOptions).runner
    if runner in _LOCAL:
        # By default Beam would first download a runner that is no Python program and
        # knows nothing of --direct_num_workers and --direct_running_mode.
        runner = fn_api_runner.FnApiRunner()
    pipeline = apache_beam.Pipeline(runner=runner, options=options)
    _ = (
        pipeline
        | "Shards" >> apache_beam.Create(list(indices))
        | "Spread" >> apache_beam.Reshuffle()
        | "Make" >> apache_beam.ParDo(MakeShardFn(shards, work))
    )
    try:
        pipeline.run().wait_until_finish()
    except Exception as error:
        # What a worker raised comes as text.
        told = re.findall(r"(?:InputError|DataError): (.+)", str(error))
        if not told:
            raise
        raise validation.InputError(told[-1]) from error
