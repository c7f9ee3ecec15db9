"""Ledgers, lists of reads, certificates, and what verifies them."""
