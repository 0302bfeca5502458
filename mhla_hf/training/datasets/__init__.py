"""Training data that are not text: labeled images, and latents."""
