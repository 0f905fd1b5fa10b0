export GOOSE_PATH_ROOT=/home/me/.local/share/weft/agents/NAME
export GOOSE_PROVIDER=openai
export GOOSE_MODEL=org/model-4bit
export GOOSE_CONTEXT_LIMIT=65536
export GOOSE_MAX_TOKENS=16384
export GOOSE_DISABLE_KEYRING=1
export OPENAI_HOST=http://127.0.0.1:8400
export OPENAI_BASE_PATH=v1/chat/completions
export OPENAI_API_KEY=none
mkdir -p /home/me/.local/share/weft/agents/NAME
goose --help
