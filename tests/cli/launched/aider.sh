export OPENAI_API_BASE=http://127.0.0.1:8400/v1
export OPENAI_API_KEY=none
mkdir -p /home/me/.local/share/weft/agents/NAME
cat > /home/me/.local/share/weft/agents/NAME/models.json << 'END'
{
  "openai/org/model-4bit": {
    "max_input_tokens": 49152,
    "max_output_tokens": 16384,
    "max_tokens": 16384,
    "litellm_provider": "openai",
    "mode": "chat",
    "input_cost_per_token": 0,
    "output_cost_per_token": 0
  }
}
END
aider --model openai/org/model-4bit --weak-model openai/org/model-4bit --model-metadata-file /home/me/.local/share/weft/agents/NAME/models.json --help
