"""What `python -m fp8moe bench` measures, one module a topic; results lie in ``results/`` as JSON lines."""
