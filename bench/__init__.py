"""Measurements, each against a rival in the same run. `python -m bench` is the CPU set; see docs/log.md for results."""
