"""Judging: the one record of a score, and the harnesses that produce it."""
