"""How each weight is stored: the policy, and the methods."""
