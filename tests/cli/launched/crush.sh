export CRUSH_GLOBAL_CONFIG=/home/me/.local/share/weft/agents/NAME
export CRUSH_GLOBAL_DATA=/home/me/.local/share/weft/agents/NAME/data
export WEFT_API_KEY=none
mkdir -p /home/me/.local/share/weft/agents/NAME
cat > /home/me/.local/share/weft/agents/NAME/crush.json << 'END'
{
  "providers": {
    "weft": {
      "name": "weft",
      "type": "openai-compat",
      "base_url": "http://127.0.0.1:8400/v1",
      "api_key": "$WEFT_API_KEY",
      "models": [
        {
          "id": "org/model-4bit",
          "name": "org/model-4bit",
          "context_window": 65536,
          "default_max_tokens": 16384
        }
      ]
    }
  },
  "models": {
    "large": {
      "provider": "weft",
      "model": "org/model-4bit"
    },
    "small": {
      "provider": "weft",
      "model": "org/model-4bit"
    }
  }
}
END
crush --help
