"""Topics of `python -m fp8moe bench`, one module each; results are in ``results/`` as JSON lines."""
