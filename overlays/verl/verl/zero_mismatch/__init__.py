"""zero-mismatch inside verl: the comparison of words in the step metrics, and the guard on weight sync.

The arithmetic is the trainer overlay's (`megatron.zero_mismatch`), which must be importable wherever a hook runs: in
the trainer's process and ranks, and in vLLM's workers. Every hook is behind VLLM_BATCH_INVARIANT=1. Nothing is
imported here, so that loading one module never loads another.
"""
