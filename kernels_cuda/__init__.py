"""The CUDA backend: the same names and signatures as `fp8moe.reference`, on `DeviceArray` buffers."""
