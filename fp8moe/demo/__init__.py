"""The demo: a byte-level mixture-of-experts language model, trained in every recipe side by side."""
