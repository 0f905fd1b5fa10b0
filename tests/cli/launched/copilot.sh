export COPILOT_HOME=/home/me/.local/share/weft/agents/NAME
export COPILOT_PROVIDER_TYPE=openai
export COPILOT_PROVIDER_BASE_URL=http://127.0.0.1:8400/v1
export COPILOT_PROVIDER_API_KEY=none
export COPILOT_PROVIDER_WIRE_API=completions
export COPILOT_PROVIDER_MAX_PROMPT_TOKENS=49152
export COPILOT_PROVIDER_MAX_OUTPUT_TOKENS=16384
export COPILOT_MODEL=org/model-4bit
export COPILOT_OFFLINE=true
mkdir -p /home/me/.local/share/weft/agents/NAME
copilot --help
