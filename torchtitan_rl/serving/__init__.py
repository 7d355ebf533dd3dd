"""The OpenAI-compatible endpoint: the messages between its process and the controller, the
sessions, and the HTTP layer around vLLM's application. That application is built in
`backends/vllm/openai.py`."""
