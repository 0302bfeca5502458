"""Evaluation of models: the harnesses that measure scores, and the records of scores."""
