"""Helpers that tests share: oracles, tiny jobs, scripts that tests kill."""
