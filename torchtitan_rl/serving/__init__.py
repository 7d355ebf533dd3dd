"""The OpenAI-compatible endpoint: what travels between its process and the controller's, the
sessions, and the HTTP shell. vLLM's serving layer itself is in `backends/vllm/openai.py`."""
