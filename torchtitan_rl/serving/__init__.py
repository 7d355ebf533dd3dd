"""The OpenAI-compatible endpoint: the messages between its process and the controller, the
sessions, and the HTTP shell. vLLM's serving layer itself is in `backends/vllm/openai.py`."""
