"""Defers the imports that take seconds, for every command.

`tfdpsq.run` imports this: what verifies, lists or refuses needs none of them. Before
TensorFlow can be loaded, `environment` turns off its logs of private rows.
"""

import tfdpsq.privacy.environment  # noqa: F401
from tfdpsq import lazy

for _name in ("tensorflow", "tensorflow_text", "dp_accounting"):
    lazy.defer(_name)
