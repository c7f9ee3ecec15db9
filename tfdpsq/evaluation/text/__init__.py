"""Generated text: similarity to a reference, diversity, copies."""
