export PI_CODING_AGENT_DIR=/home/me/.local/share/weft/agents/NAME
export WEFT_API_KEY=none
mkdir -p /home/me/.local/share/weft/agents/NAME
cat > /home/me/.local/share/weft/agents/NAME/models.json << 'END'
{
  "providers": {
    "weft": {
      "baseUrl": "http://127.0.0.1:8400/v1",
      "api": "openai-completions",
      "apiKey": "WEFT_API_KEY",
      "models": [
        {
          "id": "org/model-4bit",
          "name": "org/model-4bit",
          "reasoning": false,
          "input": [
            "text"
          ],
          "contextWindow": 65536,
          "maxTokens": 16384
        }
      ]
    }
  }
}
END
pi --provider weft --model org/model-4bit --help
