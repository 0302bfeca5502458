"""Share a model: its facts and model card, checks of its folder, the push to the Hub, and the audit."""
