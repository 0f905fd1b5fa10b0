"""Anthropic's API: Messages (POST /v1/messages) and its token counting (POST /v1/messages/count_tokens)."""
