"""Runs the shards of a pass as the elements of an Apache Beam pipeline.

Imported only for `--beam`. Each element is a shard's number; a worker loads the models
once and makes shards exactly as any other process does. The command that started the
pipeline merges them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence

import apache_beam
from absl import logging
from apache_beam.options import pipeline_options
from apache_beam.runners.portability import fn_api_runner
from apache_beam.utils import shared

from tfdpsq import validation
from tfdpsq.run.passes import passes
from tfdpsq.run.passes.shards import ShardDirectory

_LOCAL = (None, "DirectRunner", "FnApiRunner")
_WORKER = b"apache_beam.runners.worker.sdk_worker_main"
# Local workers may die so many times before the command gives up.
_TIMES_DIED = 3


class MakeShardFn(apache_beam.DoFn):
    """Makes the shard of each number; yields the number."""

    def __init__(self, shards: ShardDirectory, work: passes.Work):
        """Loads nothing yet: the function is pickled and sent to workers."""
        self._shards, self._work = shards, work
        self._shared = shared.Shared()

    def setup(self) -> None:
        """Loads the models, once per process, whatever its number of threads."""
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

    All workers must reach the directory. `flags` are Beam's own, such as
    `--runner=DataflowRunner --region=...`.

    Raises:
      InputError: a worker raised one, or local workers died repeatedly.
    """
    logging.info("%s: flags for Beam: %s", work.name, " ".join(flags) or "none")
    options = pipeline_options.PipelineOptions(list(flags))
    runner = options.view_as(pipeline_options.StandardOptions).runner
    if runner not in _LOCAL:
        _waited_for(_pipeline(runner, options, shards, work, indices))
        return
    left = list(indices)
    for _ in range(_TIMES_DIED):
        # Beam's default would download a runner that is not written in Python and
        # ignores --direct_num_workers and --direct_running_mode.
        local = fn_api_runner.FnApiRunner()
        died = _watched(_pipeline(local, options, shards, work, left))
        if died is None:
            return
        logging.warning("%s: a worker of Beam died (%s)", work.name, died)
        left = shards.missing()
        if not left:
            return
    raise validation.InputError(
        f"workers of Beam died {_TIMES_DIED} times; the last message: {died}. Finished "
        "shards are kept: run the same command again, with fewer workers if memory ran "
        "out."
    )


def _pipeline(
    runner: object,
    options: pipeline_options.PipelineOptions,
    shards: ShardDirectory,
    work: passes.Work,
    indices: Iterable[int],
) -> apache_beam.Pipeline:
    pipeline = apache_beam.Pipeline(runner=runner, options=options)
    _ = (
        pipeline
        | "Shards" >> apache_beam.Create(list(indices))
        | "Spread" >> apache_beam.Reshuffle()
        | "Make" >> apache_beam.ParDo(MakeShardFn(shards, work))
    )
    return pipeline


def _waited_for(pipeline: apache_beam.Pipeline) -> None:
    try:
        pipeline.run().wait_until_finish()
    except Exception as error:
        # A worker's error arrives as text.
        messages = re.findall(r"(?:InputError|DataError): (.+)", str(error))
        if not messages:
            raise
        raise validation.InputError(messages[-1]) from error


def _watched(pipeline: apache_beam.Pipeline) -> str | None:
    """Waits for a local pipeline, or for one of its worker processes to die.

    Beam's local runner notices a dead worker in another thread only, and goes on
    waiting for its result.

    Returns:
      The message of a worker's death; `None` when all work is done.
    """
    over = threading.Event()
    died: list[str] = []
    failed: list[BaseException] = []
    before = threading.excepthook

    def note(error: threading.ExceptHookArgs) -> None:
        if error.thread is None or error.thread.name != "run_worker":
            before(error)
            return
        died.append(str(error.exc_value))
        over.set()

    def run() -> None:
        try:
            _waited_for(pipeline)
        except BaseException as error:
            failed.append(error)
        finally:
            over.set()

    threading.excepthook = note
    try:
        threading.Thread(target=run, name="pipeline", daemon=True).start()
        over.wait()
    finally:
        threading.excepthook = before
    if died:
        _end_workers()
        return died[0]
    if failed:
        raise failed[0]
    return None


def _end_workers() -> None:
    """Ends the worker processes that this process started, which have no work left."""
    parents, workers = {}, []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # already ended
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(status[1])
            if _WORKER in (entry / "cmdline").read_bytes():
                workers.append(int(entry.name))
    for worker in workers:
        # A shell that we started, and the worker that the shell started.
        if os.getpid() in (parents[worker], parents.get(parents[worker])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
