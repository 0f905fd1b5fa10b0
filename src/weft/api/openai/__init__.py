"""The wires in OpenAI's dialect: each endpoint is two pure translators around one `Generation` and its deltas."""
