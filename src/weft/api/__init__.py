"""HTTP layer: parses requests of the OpenAI, Anthropic and Ollama APIs and encodes replies. Never imports mlx."""
