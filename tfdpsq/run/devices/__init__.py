"""Devices that a stage trains on: strategies, workers, TPUs, preemption."""
