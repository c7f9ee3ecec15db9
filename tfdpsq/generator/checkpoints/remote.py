"""Checkpoints where they are published, such as `gs://bucket/checkpoint_1000000`.

The weights are copied to a temporary directory of the process, without what training
kept next to them: in a T5X checkpoint, `state.*` is the optimizer's and twice as large.
To copy once for all commands, `convert` it.
"""

from __future__ import annotations

import atexit
import functools
import pathlib
import shutil
import tempfile

import tensorflow as tf

from tfdpsq import validation
from tfdpsq.data import any_files

# Arrays of the optimizer's state, by the names that T5X gives their directories.
_STATE = "state."
_SEVERAL = "checkpoint_"


@functools.cache
def local_copy(url: str) -> pathlib.Path:
    """Copies a remote checkpoint; the same directory for every call of a process.

    Args:
      url: a directory on a file system that TensorFlow knows, without a last "/".

    Raises:
      InputError: there is no such directory, it cannot be read, or it holds several
        checkpoints.
    """
    try:
        names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(url))
    except tf.errors.OpError as error:
        reason = str(error.message).strip().partition("\n")[0][:200]
        raise validation.InputError(
            f"{url} does not exist, or cannot be read ({reason}). Give the directory "
            "of one checkpoint, and the rights to read it."
        ) from error
    several = [name for name in names if name.startswith(_SEVERAL)]
    if several:
        last = max(several, key=lambda name: (len(name), name))
        raise validation.InputError(
            f"{url} holds {len(several)} checkpoints. Give one of them, for example "
            f"{url}/{last}."
        )
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tfdpsq-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / url.rpartition("/")[2]
    target.mkdir()
    try:
        for name in names:
            if name.startswith(_STATE):
                continue
            source, place = f"{url}/{name}", str(target / name)
            if tf.io.gfile.isdir(source):
                any_files.copy_tree(source, place)
            else:
                tf.io.gfile.copy(source, place)
    except tf.errors.OpError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise validation.InputError(
            f"{url}/{name} cannot be copied to {folder} "
            f"({str(error.message)[:200]}). Start again, or copy the checkpoint first."
        ) from error
    return target
