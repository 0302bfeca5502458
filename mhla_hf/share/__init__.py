"""From a model to a repository: one self-contained source file per checkpoint, the card, the push."""
