"""Runs stages: settings, inputs, places, records, shards, the command line."""
