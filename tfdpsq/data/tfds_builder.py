"""TensorFlow Datasets over any BEIR directory, every query kept.

Importing this module registers the data set:

    import tensorflow_datasets as tfds
    import tfdpsq.data.tfds_builder

    train = tfds.load(
        "beir_directory", split="train", builder_kwargs={"path": "data/my_pairs"}
    )

(TFDS's own `beir` data sets keep one query a passage and drop the others.) It is
not imported by `tfdpsq.data`, which stays usable without loading TFDS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from tfdpsq.data.beir import BeirDirectory
from tfdpsq.validation import InputError

try:
    import tensorflow_datasets as tfds
except ImportError as error:
    raise ImportError(
        "tfdpsq.data.tfds_builder needs TensorFlow Datasets. Run: pip install "
        "tensorflow-datasets==4.9.10 'tensorflow-metadata<1.17'"
    ) from error


class BeirDirectoryBuilder(tfds.core.GeneratorBasedBuilder):
    """One example for each pair judged above 0, in each split of the directory.

    Features, all scalar: ``query_id``, ``query``, ``document_id``, ``document``
    (title and text) as strings, ``score`` as int64. A query with k relevant
    documents has k examples: for training under DP, use `BeirDirectory.pairs`.

    What was prepared is kept under the directory's fingerprint, so that changed
    files are prepared again.
    """

    name = "beir_directory"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}
    # TFDS looks next to the code for checksums of downloads (with a package that
    # it does not require, importlib_resources); there are none.
    code_path = None

    def __init__(self, *, path: str | os.PathLike | None = None, **kwargs: Any) -> None:
        """Opens a BEIR directory.

        Args:
          path: the directory.
          **kwargs: as for every TFDS builder (`data_dir`, ...), except `config`.

        Raises:
          DataError: the directory is incomplete or malformed.
          InputError: `path` or another `config` than its own was given.
        """
        if path is None:
            raise InputError(
                "beir_directory needs a path: tfds.load('beir_directory', "
                "builder_kwargs={'path': ...})."
            )
        self._beir = BeirDirectory(path)
        name = self._beir.fingerprint()[:16]
        if kwargs.pop("config", None) not in (None, name):
            raise InputError(
                "beir_directory takes no config; give the path of another directory."
            )
        config = tfds.core.BuilderConfig(name=name, version=self.VERSION)
        super().__init__(config=config, **kwargs)
        # How TFDS makes a copy of the builder in another process.
        self._original_state = {"path": os.fspath(path), **kwargs}

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            description="Query-document pairs of a BEIR directory.",
            features=tfds.features.FeaturesDict(
                {
                    "query_id": text,
                    "query": text,
                    "document_id": text,
                    "document": text,
                    "score": tfds.features.Scalar(dtype=np.int64),
                }
            ),
            supervised_keys=("document", "query"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        del dl_manager  # Nothing is downloaded.
        return {split: self._generate_examples(split) for split in self._beir.splits()}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict]]:
        scores = self._beir.qrels(split)
        for key, pair in enumerate(self._beir.all_pairs(split)):
            yield (
                key,
                {
                    "query_id": pair.query_id,
                    "query": pair.query,
                    "document_id": pair.document_id,
                    "document": pair.document,
                    "score": scores[pair.query_id][pair.document_id],
                },
            )
