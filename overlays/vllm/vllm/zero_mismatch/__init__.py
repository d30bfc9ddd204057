"""zero-mismatch: every value a rollout logprob depends on, computed in an order no neighbour can change.

One operator, one module. A patch under `patches/vllm/` hooks a module in; the module holds the kernel, its launcher and
a plain PyTorch reference. Nothing is imported here, so that importing one operator never loads another.
"""
