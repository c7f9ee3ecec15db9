"""Loads or saves a T5 of a published size and prints what memory that took.

    memory_child.py save|load SIZE VERSION DIRECTORY

Printed is the peak of this process above what TensorFlow takes once it is imported and
has run an operation, and the size of the weights' file; in bytes.
"""

import os
import pathlib
import sys

import tensorflow as tf

from tfdpsq.generator import T5QueryGenerator
from tfdpsq.layers import T5Config


def _status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(key)]
    return int(line.split()[1]) * 1024


def main(action, size, version, directory):
    """Does it."""
    tf.reduce_sum(tf.ones([2, 2])).numpy()
    before = _status("VmRSS")
    if action == "save":
        T5QueryGenerator(T5Config.from_size(size, version)).save_to_preset(directory)
    else:
        T5QueryGenerator.from_preset(directory)
    weights = os.path.getsize(pathlib.Path(directory) / "model.safetensors")
    print(_status("VmHWM") - before, weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
