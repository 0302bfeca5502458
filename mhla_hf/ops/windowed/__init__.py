"""Windowed attention: exact softmax over a window of near tokens, MHLA by decays over all far ones."""
