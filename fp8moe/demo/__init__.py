"""The demo: trains a small mixture-of-experts transformer in every recipe."""
