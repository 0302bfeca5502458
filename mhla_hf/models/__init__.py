"""The models that transformers and diffusers load: language, text encoder, vision, and diffusion models."""
