"""The operations, a module each: argument checks, specifications of the results, the call on a backend."""
