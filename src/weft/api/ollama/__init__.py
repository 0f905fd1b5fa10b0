"""Ollama's wire: a fixed small part of it, for programs that speak nothing else."""
