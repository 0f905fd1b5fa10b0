"""OpenAI's APIs: Chat Completions, Completions and Responses."""
