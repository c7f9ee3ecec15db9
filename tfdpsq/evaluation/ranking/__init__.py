"""Rankings: BM25, TREC files, measures, and tests of differences."""
