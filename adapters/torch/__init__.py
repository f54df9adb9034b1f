"""torch: operations, the expert layer and its transports. `fp8moe.torch` has the public names."""
