"""How fast Onetake is, beside the same work written by hand: `python -m benchmarks.quick`."""
