"""What the ecosystems load: language models, cache layer, and (with their issues) vision and diffusion models."""
