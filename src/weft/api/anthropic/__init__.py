"""Anthropic's wire: a translator from JSON to `GenerationRequest`, and one from deltas to its events."""
