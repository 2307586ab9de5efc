"""Measurements: `python -m benchmarks.bench_ops`, `python -m benchmarks.bench_layer`."""
