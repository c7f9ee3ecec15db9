"""Synthetic queries with a differential privacy guarantee.

Importing this package imports nothing else. Its parts check that Python and TensorFlow
are versions they work on (see `stack`), but for `results`, which reads workdirs on any
Python, and `layers` and `privacy`, which work on others, too (see `keras_choice`).
"""

__version__ = "0.2.0"
