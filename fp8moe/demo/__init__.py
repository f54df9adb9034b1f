"""The demo: trains a byte-level mixture-of-experts language model in every recipe."""
