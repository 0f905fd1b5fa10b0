export OPENCODE_CONFIG_DIR=/home/me/.local/share/weft/agents/NAME
export OPENCODE_CONFIG_CONTENT='{"provider": {"weft": {"npm": "@ai-sdk/openai-compatible", "name": "weft", "options": {"baseURL": "http://127.0.0.1:8400/v1", "apiKey": "{env:WEFT_API_KEY}"}, "models": {"org/model-4bit": {"name": "org/model-4bit", "limit": {"context": 65536, "output": 16384}}}}}, "model": "weft/org/model-4bit", "small_model": "weft/org/model-4bit"}'
export WEFT_API_KEY=none
mkdir -p /home/me/.local/share/weft/agents/NAME
opencode --help
