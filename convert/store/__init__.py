"""Bundles: what is written, the folder, what may be added later."""
