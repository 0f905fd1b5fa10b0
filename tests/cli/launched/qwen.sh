export QWEN_HOME=/home/me/.local/share/weft/agents/NAME
export QWEN_CODE_SYSTEM_SETTINGS_PATH=/home/me/.local/share/weft/agents/NAME/weft.json
export WEFT_API_KEY=none
mkdir -p /home/me/.local/share/weft/agents/NAME
cat > /home/me/.local/share/weft/agents/NAME/weft.json << 'END'
{
  "security": {
    "auth": {
      "selectedType": "openai"
    }
  },
  "model": {
    "name": "org/model-4bit"
  },
  "modelProviders": {
    "openai": [
      {
        "id": "org/model-4bit",
        "name": "org/model-4bit",
        "baseUrl": "http://127.0.0.1:8400/v1",
        "envKey": "WEFT_API_KEY",
        "generationConfig": {
          "contextWindowSize": 65536,
          "samplingParams": {
            "max_tokens": 16384
          }
        }
      }
    ]
  }
}
END
qwen --help
