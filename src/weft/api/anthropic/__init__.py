"""Anthropic's wire: a translator from JSON to `Generation`, and one from deltas to its events."""
