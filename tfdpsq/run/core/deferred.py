"""Defers the imports that take seconds, for every command.

`tfdpsq.run` imports this: what verifies, lists or refuses needs none of them.
"""

from tfdpsq import lazy

for _name in ("tensorflow", "tensorflow_text", "dp_accounting"):
    lazy.defer(_name)
