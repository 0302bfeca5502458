"""Language models: from scratch, and converted from softmax."""
