"""The wires in OpenAI's dialect: each endpoint is two pure translators around one `GenerationRequest` and its deltas."""
