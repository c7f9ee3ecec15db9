"""Runs notebooks from top to bottom and writes their outputs into them.

    python notebooks/execute.py                 # all five, in their order
    python notebooks/execute.py 2_finetune      # one of them

Needs ipykernel, nbclient, nbformat, pandas and matplotlib, on Python 3.9 to 3.13. Each
runs in a fresh kernel of this Python; its stages run in the environment that
`environment.py` makes, or in that of TFDPSQ_PYTHON, at the scale and in the directory
that TFDPSQ_NOTEBOOK_SCALE and TFDPSQ_NOTEBOOK_DIR say. Progress bars and a command's
log are left out. A cell that fails, or that writes anything else to standard error, is
an error, and the notebook stays as it was.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence

import nbclient
import nbformat
import traitlets.config
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

FOLDER = pathlib.Path(__file__).resolve().parent
ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    # Without widgets in the environment, tqdm would say so in every notebook.
    "PYTHONWARNINGS": "ignore:IProgress not found",
}
# A bar's "[00:12<00:03, 4.1text/s]", or without a total "[00:12, 4.1text/s]"; or
# "INFO:absl:written: started", a command's log.
PROGRESS = re.compile(r"\[\d+:\d\d(:\d\d)?[<,][^\]]*\]|^INFO:absl:")


class Kernel(AsyncKernelManager):
    """A kernel of the running interpreter, whatever others are installed."""

    @traitlets.default("kernel_spec_manager")
    def _running_interpreter(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def paths() -> list[pathlib.Path]:
    """The notebooks, in the order in which they are to be read."""
    return sorted(FOLDER.glob("[0-9]_*.ipynb"))


def without_progress(text: str) -> str:
    """What was written to standard error besides progress bars."""
    lines = re.split(r"[\r\n]", text)
    return "\n".join(x for x in lines if x.strip() and not PROGRESS.search(x))


def execute(
    path: pathlib.Path, environment: dict[str, str], timeout: int = 1800
) -> nbformat.NotebookNode:
    """Runs one notebook.

    Args:
      path: the notebook; the file is only read.
      environment: variables to set, besides those of this process.
      timeout: seconds that one cell may take.

    Returns:
      The notebook with its outputs.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
      RuntimeError: a cell wrote to standard error.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as sockets:
        settings = {"transport": "ipc", "connection_file": f"{sockets}/kernel.json"}
        client = nbclient.NotebookClient(
            notebook,
            kernel_name="python3",
            kernel_manager_class=Kernel,
            config=traitlets.config.Config({"ConnectionFileMixin": settings}),
            timeout=timeout,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
        )
        client.execute(env={**os.environ, **ENVIRONMENT, **environment})
    # The version of the Python that it was run by is nothing that it says.
    notebook.metadata["language_info"] = {"name": "python"}
    for number, cell in enumerate(notebook.cells):
        for output in list(cell.get("outputs", [])):
            if output.get("name") != "stderr":
                continue
            said = without_progress(output["text"])
            if said:
                raise RuntimeError(
                    f"{path.name}, cell {number}, wrote to standard error:\n{said}"
                )
            cell.outputs.remove(output)
    return notebook


def main(names: Sequence[str]) -> None:
    """Executes notebooks in place.

    Args:
      names: their names without ending; none for all of them.
    """
    unknown = set(names) - {path.stem for path in paths()}
    if unknown:
        sys.exit(f"error: no notebook is called {', '.join(sorted(unknown))}.")
    for path in paths():
        if not names or path.stem in names:
            started = time.monotonic()
            notebook = execute(path, {})
            nbformat.write(notebook, path)
            print(f"{path.name}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
