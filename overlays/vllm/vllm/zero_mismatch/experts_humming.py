"""Experts by Humming: the check that every kernel it may launch adds in one order.

Humming (humming-kernels 0.1.19, tune/sm90_policies.py) keeps a table for each of the two expert GEMMs: from how many
routed rows to how many, with which tiles. Under batch invariance (`use_batch_invariant`, set by vLLM's
fused_moe/experts/fused_humming_moe.py) the tiles of rows still follow the batch, which moves no bit: a routed row is
one column of the instruction and reads no other. What orders an output's sum over K must be one for the whole table:

- no stream-K: a tile's K is never cut by how many tiles there are;
- one K partition in a tile (block_k == warp_k), and the same one everywhere: steps of block_k in order;
- one instruction, which fixes the order inside a step, and fp32 accumulation.

Invariant: a table that passes `check_tables` gives a routed row the same bits at every number of rows. The table is
made when the experts are built, so a release of Humming that drops this is an error at start-up, not a silent
difference. What the instruction itself does is proven on the GPU (tests/gpu/test_experts_humming.py).
"""


def _order(config: dict) -> dict:
    """What of a kernel's configuration decides the order of an output's sum."""
    return {
        "instruction": config.get("mma_type"),
        "K of a tile": config["block_shape"][2],
        "K of a warp": config["warp_shape"][2],
        "fp16 accumulation": bool(config.get("use_f16_accum", False)),
        "stream-K": bool(config.get("use_stream_k", True)),  # Humming's own default
    }


def check_tables(**tables: list) -> None:
    """Raises ValueError unless each table, rows of (above, up to, configuration), has one order and no split of K."""
    for name, table in tables.items():
        orders = [(f"{above} < rows <= {up_to}", _order(config)) for above, up_to, config in table]
        first = orders[0][1]
        for rows, order in orders:
            split = order["stream-K"] or order["K of a tile"] != order["K of a warp"] or order["fp16 accumulation"]
            if split or order != first:
                raise ValueError(
                    f"Humming's kernels for {name} do not add in one order: at {rows} found {order}, expected {first} "
                    "with one K partition, fp32 accumulation and no stream-K at every number of rows. Use "
                    "humming-kernels 0.1.19, or unset VLLM_BATCH_INVARIANT.")
