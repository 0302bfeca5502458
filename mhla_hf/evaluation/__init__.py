"""Evaluation: records of scores, and the harnesses that measure them."""
