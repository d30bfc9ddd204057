"""Proofs that a patched engine is bit-consistent. See README.md; run as `python -m prove`."""
