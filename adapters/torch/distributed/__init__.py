"""Transports between the ranks of torch's process groups."""
