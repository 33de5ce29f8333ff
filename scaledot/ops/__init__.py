"""The public verbs on arrays."""
