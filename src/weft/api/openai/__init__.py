"""OpenAI's dialects: Chat Completions, Completions and Responses."""
