"""The context of a training stage: places, vocabulary, inputs and lineage.

`resolve` finds all of them once, before anything is read or spent. What trains then
takes the values that it needs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from typing import Any

import ml_collections

from tfdpsq.data import Tokenizer
from tfdpsq.generator import checkpoints
from tfdpsq.privacy.proof import certificate as certificates
from tfdpsq.run.attacks import canary_set
from tfdpsq.run.core import releases, sources, workdir
from tfdpsq.run.devices import strategy
from tfdpsq.run.passes import document_rates


@dataclasses.dataclass(frozen=True)
class Context:
    """Places, vocabulary, inputs and lineage of one run of a stage that trains.

    Attributes:
      output: the output directory and its guarantee.
      private: directory of what must not be released.
      run_dir: directory of the run's secrets, states and ledger.
      vocabulary: the SentencePiece file.
      tokenizer: reads it.
      inputs: fingerprints of all that the stage reads.
      parent: certificate of the starting weights; `None` for public ones.
      devices: the devices to train on.
      histogram: certificate of a histogram whose cost the run counts, too; `None` for
        none.
    """

    output: releases.Output
    private: pathlib.Path
    run_dir: pathlib.Path
    vocabulary: pathlib.Path
    tokenizer: Tokenizer
    inputs: dict[str, str]
    parent: dict[str, Any] | None
    devices: strategy.Devices
    histogram: dict[str, Any] | None = None


def resolve(
    config: ml_collections.ConfigDict,
    directory: pathlib.Path,
    devices: strategy.Devices,
    holds: str,
    *,
    method_protects: bool = True,
    trains: bool = True,
    stays_private: bool = False,
    covered: tuple[str, ...] = (),
) -> Context:
    """Resolves the settings of a stage that trains into `directory`.

    `holds` names the output, for errors. `method_protects` tells whether a finite ε
    protects the pairs, `trains` whether they are used at all; `stays_private` is for
    what is not released, whatever its ε. `covered` are settings whose files are private
    and which ε covers.

    Raises:
      InputError: canaries outside the private directory, a missing vocabulary or
        model, or an output that may not be where it is.
      DataError: a damaged certificate, or damaged pairs.
    """
    private = releases.private_directory(directory, config.private_directory)
    canary_set.require_private_output(config.pairs, private, directory)
    parent = sources.certificate_of_model(config.init)
    start = checkpoints.locate(config.init) if config.init else ""
    unused: tuple[str, ...] = ()
    if trains or not devices.chief:
        protected = method_protects and math.isfinite(float(config.epsilon))
        guarantee = guarantee_of_training(
            config.pairs, os.fspath(start), parent, devices.chief, protected
        )
        unused = covered if protected else ()
    else:
        guarantee = releases.guarantee_of(parent, os.fspath(start))
        unused = ("pairs",)
    if stays_private:
        guarantee = releases.PRIVATE
    output = releases.Output(
        directory, guarantee, holds, config.private_directory, unused=unused
    )
    vocabulary = sources.vocabulary_file(config.vocabulary, config.init)
    tokenizer = Tokenizer(vocabulary)
    inputs = {
        "pairs": sources.source_fingerprint(config.pairs, private),
        "vocabulary": tokenizer.fingerprint,
    }
    if start:
        inputs["init"] = workdir.model_fingerprint(start)
    histogram = None
    if config.get("histogram"):
        histogram = document_rates.certificate_of(config.histogram)
        # What could not be synthesized by would be paid for in vain.
        document_rates.Histogram.load(config.histogram).positive_counts()
        inputs["histogram"] = workdir.stage_fingerprint(config.histogram)
    return Context(
        output,
        private,
        private / workdir.RUNS / directory.name,
        vocabulary,
        tokenizer,
        inputs,
        parent,
        devices,
        histogram,
    )


def guarantee_of_training(
    pairs: str, start: str, parent: dict[str, Any] | None, chief: bool, protected: bool
) -> str:
    """Returns the guarantee of a model trained on `pairs`; see `releases`.

    `start` is the path of the starting weights, "" for random ones, and `parent` their
    certificate. A worker that is not the chief certifies nothing. `protected` tells
    whether a finite ε protects private pairs.

    Raises:
      InputError: pairs and starting weights have guarantees that would add up.
      DataError: the certificate of the pairs is damaged.
    """
    if not chief or canary_set.holds_canaries(pairs):
        return releases.PRIVATE
    if not sources.is_free(pairs):
        return releases.CERTIFIED if protected else releases.PRIVATE
    certificate = certificates.inherited_certificate(
        sources.certificate_of_pairs(pairs), parent
    )
    return releases.guarantee_of(certificate, pairs, start)
