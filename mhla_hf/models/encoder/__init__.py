"""Converted text encoders."""
