"""A bundle against diffusers: weights, blocks, outputs, latents, pictures; the report."""
