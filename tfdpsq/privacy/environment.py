"""Checks that there is a Keras 2 to train, when `tfdpsq.privacy` is imported.

The other packages have `tfdpsq.stack`, which looks at versions alone. Where that was
imported there is one, and TensorFlow, which takes seconds, is not imported yet.
"""

import sys

if "tfdpsq.stack" not in sys.modules:
    from tfdpsq.keras_choice import keras2  # noqa: F401
