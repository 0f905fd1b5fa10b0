"""Anthropic's dialect: Messages and its count of tokens."""
