"""The better queries of a synthetic set, with the guarantee of the whole set.

python -m tfdpsq.run.filter --config=configs/filter.py --workdir=OUT \
    --config.synthetic=SET --config.corpus=BEIR_DIR

A round trip through a retriever that was trained on the same set:
--config.round_trip.retriever=RETRIEVER_DIR --config.round_trip.vocabulary=SPIECE_MODEL
"""

from tfdpsq.run import filter as filter_stage
from tfdpsq.run.search import round_trip


def get_config():
    """Two words or more, no duplicates, and BM25 brings the document back in ten."""
    config = filter_stage.default_config()
    config.min_words = 2
    config.duplicates = True
    config.round_trip.retriever = round_trip.BM25
    config.round_trip.k = 10
    return config
