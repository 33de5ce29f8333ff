"""Drop-in namespaces: the names and signatures of jax.nn, Qwix and TransformerEngine, implemented by scaledot."""
