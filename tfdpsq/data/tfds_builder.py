"""TensorFlow Datasets over any set or BEIR directory that tfdpsq writes.

Importing this module registers the data set:

    import tensorflow_datasets as tfds
    import tfdpsq.data.tfds_builder

    train = tfds.load(
        "beir_directory", split="train", builder_kwargs={"path": "private/pairs"}
    )

(TFDS's own `beir` data sets keep one query a passage and drop the others.) It is
not imported by `tfdpsq.data`, which stays usable without loading TFDS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from tfdpsq.data import io, sets
from tfdpsq.data.beir import BeirDirectory
from tfdpsq.validation import InputError


class BeirDirectoryBuilder(tfds.core.GeneratorBasedBuilder):
    """One example for each pair judged above 0, in each split of the directory.

    Features, all scalar: ``query_id``, ``query``, ``document_id``, ``document``
    (title and text) as strings, ``score`` as int64. A query with k relevant
    documents has k examples: for training under DP, use `BeirDirectory.pairs`.
    """

    name = "beir_directory"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}
    code_path = None  # TFDS looks next to it for checksums of downloads.

    def __init__(self, *, path: str | os.PathLike | None = None, **kwargs: Any) -> None:
        """Opens `path`, a BEIR directory or a set, kept under its fingerprint.

        `kwargs` are as for every TFDS builder, except `config`. Without `data_dir`,
        pairs of a BEIR directory, which may be private, are prepared in the
        ``private/tfds`` that it is in or next to.
        """
        if path is None:
            raise InputError("beir_directory needs builder_kwargs={'path': ...}.")
        root = Path(path).absolute()
        if (root / io.MANIFEST).is_file():
            sets.verify(root)
            self._beir = BeirDirectory(root / sets.BEIR)
        else:
            self._beir = BeirDirectory(root)
            if kwargs.get("data_dir") is None:
                around = (each for each in root.parents if each.name == "private")
                private = next(around, root.parent / "private")
                kwargs["data_dir"] = private / "tfds"
                kwargs["data_dir"].mkdir(parents=True, exist_ok=True, mode=0o700)
        kwargs.pop("config", None)
        config = tfds.core.BuilderConfig(
            name=self._beir.fingerprint()[:16], version=self.VERSION
        )
        super().__init__(config=config, **kwargs)
        # How TFDS makes a copy of the builder in another process.
        self._original_state = {"path": os.fspath(path), **kwargs}

    def _info(self) -> Any:
        names = ("query_id", "query", "document_id", "document")
        features: dict[str, Any] = {name: tfds.features.Text() for name in names}
        features["score"] = tfds.features.Scalar(dtype=np.int64)
        return tfds.core.DatasetInfo(
            builder=self,
            description="Query-document pairs of a BEIR directory.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("document", "query"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict:
        del dl_manager  # Nothing is downloaded.
        return {split: self._generate_examples(split) for split in self._beir.splits()}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict]]:
        scores = self._beir.qrels(split)
        for key, pair in enumerate(self._beir.all_pairs(split)):
            score = scores[pair.query_id][pair.document_id]
            yield key, {**vars(pair), "score": score}
