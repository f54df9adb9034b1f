"""JAX: operations and the expert layer, eagerly and traced. `fp8moe.jax` has the public names."""
