"""Programs run: inputs bound, weights loaded, entries evaluated."""
