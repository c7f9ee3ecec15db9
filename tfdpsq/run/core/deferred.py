"""Defers the imports that take seconds, for every command.

`tfdpsq.run` imports this: what verifies, lists or refuses needs none of them. Before
TensorFlow can be loaded, its warnings are turned off: one that an operation logs when
it refuses a value quotes private rows.
"""

import os

from tfdpsq import lazy

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
for _name in ("tensorflow", "tensorflow_text", "dp_accounting"):
    lazy.defer(_name)
