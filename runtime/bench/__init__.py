"""How long a step takes, in what memory, and where the time goes: `bench` and `profile`."""
