"""The public API: its names, and the examples in its docstrings."""

import doctest
import importlib

import pytest
import tensorflow as tf

# What a package exports; everything else is imported from its own module.
_PUBLIC = {
    "layers": """
        FirstTokenPooling Folded LoRADense LoRAEinsumDense MaskedMeanPooling
        QueryAdapter Scale SeededDropout SoftPrompt T5Backbone T5Config
        T5TransformerLayer apply_lora build_encoder dropout_seed encoder_of merge_lora
        sampled_softmax train_only with_lora
    """,
    "generator": """
        QueryLikelihood RerankedSearch SamplingConfig SynthesisConfig Synthesizer
        T5QueryGenerator encode_pairs synthesize
    """,
    "retriever": """
        METHODS DocumentIndex Embedder GroupLosses LogitTerms NaiveLosses
        PublicNegatives RetrieverConfig ScannBruteForce ScannTree SearchModel
        StoredPairs TwoTower as_run cached_gradients collate encode_documents
        encode_negatives encode_pairs encode_texts in_batch_losses load
        logit_dp_is_vacuous_above logit_dp_sensitivity_multiplier make_batches
        microbatch_sensitivity_multiplier naive_sensitivity_multiplier
        public_negatives_sensitivity_multiplier save search store_pairs with_vectors
    """,
}


def _package(name):
    return importlib.import_module(f"tfdpsq.{name}")


def _examples():
    """(package, name, example) of everything exported whose docstring has one."""
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    found = []
    for package in _PUBLIC:
        for name in _package(package).__all__:
            thing = getattr(_package(package), name)
            if not callable(thing):
                continue
            own = vars(importlib.import_module(thing.__module__))
            names = {**vars(_package("layers")), **own}
            found += [
                pytest.param(test, id=f"{package}.{test.name}")
                for test in finder.find(thing, name, globs=dict(names))
                if test.examples
            ]
    return found


@pytest.mark.parametrize("package", _PUBLIC)
def test_a_package_exports_what_is_public_and_nothing_else(package):
    assert sorted(_package(package).__all__) == sorted(_PUBLIC[package].split())


@pytest.mark.parametrize("package", _PUBLIC)
def test_every_exported_keras_class_shows_an_example(package):
    without = [
        name
        for name in _package(package).__all__
        if isinstance(thing := getattr(_package(package), name), type)
        and issubclass(thing, tf.keras.layers.Layer)
        and ">>> " not in (thing.__doc__ or "")
    ]
    assert not without


@pytest.mark.parametrize("example", _examples())
def test_an_example_gives_what_its_docstring_says(example):
    tf.keras.utils.set_random_seed(0)
    told: list = []
    failed = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert not failed.failed, "".join(told)
