"""Serves converted language models with vLLM: `vllm serve FOLDER` finds `register` by its entry point."""
