"""How a model gets in, and what it can do."""
