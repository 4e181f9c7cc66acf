"""What is changed in torch while a module is traced, and undone afterwards."""
