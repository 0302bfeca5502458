"""Serves converted language models with vLLM: `vllm serve FOLDER` finds `plugin.register` by its entry point."""
