"""Every supported class, with its measured figures."""
