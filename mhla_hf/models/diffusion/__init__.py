"""Converted transformers of diffusers."""
