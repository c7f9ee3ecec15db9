"""The examples in the docstrings of the public API give what they say."""

import doctest
import importlib

import pytest
import tensorflow as tf


def _examples():
    """The examples of everything exported whose docstring has one."""
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    layers = vars(importlib.import_module("tfdpsq.layers"))
    found = []
    for package in ("layers", "generator", "retriever"):
        module = importlib.import_module(f"tfdpsq.{package}")
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing):
                continue
            names = {**layers, **vars(importlib.import_module(thing.__module__))}
            found += [
                pytest.param(test, id=f"{package}.{test.name}")
                for test in finder.find(thing, name, globs=names)
                if test.examples
            ]
    return found


@pytest.mark.parametrize("example", _examples())
def test_example_gives_what_its_docstring_says(example):
    tf.keras.utils.set_random_seed(0)
    told: list = []
    failed = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert not failed.failed, "".join(told)
