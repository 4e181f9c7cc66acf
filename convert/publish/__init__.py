"""From a bundle to a repository on the Hub: licence, card, upload, and proof that it arrived.

Nothing here needs PyTorch.
"""
