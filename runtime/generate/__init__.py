"""Prompts to pictures: text, noise, the loop, decoding."""
