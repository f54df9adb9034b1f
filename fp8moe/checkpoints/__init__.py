"""Checkpoints on disk: files of safetensors, and their conversion from one published form to another."""
