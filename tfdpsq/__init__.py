"""Synthetic queries with a differential privacy guarantee.

Importing this package imports nothing else. Its parts check that they work on this
Python and TensorFlow (see `stack` and `keras_choice`).
"""

__version__ = "0.2.0"
