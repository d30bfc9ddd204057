"""zero-mismatch, the trainer's side: vLLM's kernels give the values, this package adds backward, guards and objective.

Every module here imports with PyTorch alone. What subclasses Megatron-core (Python >= 3.12) imports it inside
functions. Nothing is imported here, so that loading one module never loads another.
"""
