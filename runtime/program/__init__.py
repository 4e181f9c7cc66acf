"""Programs: typed nodes, their stages, their sizes."""
