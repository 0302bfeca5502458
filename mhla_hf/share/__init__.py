"""Sharing a model: facts and the model card, checks of its folder, the push to the Hub, and the audit."""
