"""Share a model: its facts and model card, checks of its folder, and the push to the Hub."""
