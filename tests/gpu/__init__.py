"""A package, so that a file here may have the name of its twin in tests/kernels."""
