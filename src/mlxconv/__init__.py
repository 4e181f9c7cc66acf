"""mlxconv: convert diffusers models to MLX, and prove parity."""
