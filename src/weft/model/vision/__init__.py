"""Images for vision-language models: towers that encode them, positions of their tokens, and what a forward is handed."""
