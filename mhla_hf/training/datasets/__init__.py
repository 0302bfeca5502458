"""Training data: labeled images, and latents of diffusion models (text is in `mhla_hf.data`)."""
