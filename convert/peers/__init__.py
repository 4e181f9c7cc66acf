"""The other side of `bench --against`."""
