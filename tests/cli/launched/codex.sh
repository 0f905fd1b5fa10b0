export CODEX_HOME=/home/me/.local/share/weft/agents/NAME
export WEFT_API_KEY=none
mkdir -p /home/me/.local/share/weft/agents/NAME
codex -c 'model="org/model-4bit"' -c 'model_provider="weft"' -c model_context_window=65536 -c 'model_providers.weft.name="weft"' -c 'model_providers.weft.base_url="http://127.0.0.1:8400/v1"' -c 'model_providers.weft.wire_api="responses"' -c 'model_providers.weft.env_key="WEFT_API_KEY"' --help
