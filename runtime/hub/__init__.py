"""The Hub: names, listings, downloads, failures, bundles there."""
