"""Run the two simulations and write results.json and simulation.png beside this file.

    PYTHONPATH=overlays/megatron python docs/reinforce_zero/simulate.py

Needs torch, numpy and matplotlib; about a quarter of an hour on one CPU core. Seeds are fixed.
"""
import json
import pathlib
import platform
import statistics
import sys

import gaussian_policy as gaussian
import numpy as np
import token_policy as tokens
import torch

from megatron.zero_mismatch.mismatch_metrics import peak_to_median

HERE = pathlib.Path(__file__).parent
LAGS, SEEDS, UPDATES, STEP = (2, 8, 64), (0, 1, 2), 2000, 20.0
TAUS, ETA, BATCH, CHAINS = (0.0, 0.2, 0.4, 0.6), 0.5, 8, 20_000
BLOCK = 100  # updates a point of a drawn mean


def run_tokens(lag: int, stock: bool, seed: int) -> dict:
    measured = list(tokens.train(lag, stock, UPDATES, STEP, seed))
    tenth = UPDATES // 10
    kernel = [split.kernel.k3 for split, _, _ in measured]
    d3 = [split.total.k3 for split, _, _ in measured]
    rewards = [reward for _, reward, _ in measured]
    return {
        "lag": lag, "stock": stock, "seed": seed,
        "d3": d3, "kernel_k3": kernel, "reward": rewards,
        "summary": {
            "d3_peak_to_median": peak_to_median(d3),
            "d3_median": statistics.median(d3),
            "lag_k3_median": statistics.median(split.lag.k3 for split, _, _ in measured),
            "kernel_k3_first_tenth": statistics.fmean(kernel[:tenth]),
            "kernel_k3_last_tenth": statistics.fmean(kernel[-tenth:]),
            "kernel_k3_max": max(kernel),
            "differing_words": sum(split.words.differing_words for split, _, _ in measured),
            "tokens": sum(split.words.tokens for split, _, _ in measured),
            "max_weight": max(split.total.max_weight for split, _, _ in measured),
            "max_gradient_norm": max(norm for _, _, norm in measured),
            "reward_first_tenth": statistics.fmean(rewards[:tenth]),
            "reward_last_tenth": statistics.fmean(rewards[-tenth:]),
        },
    }


def run_gaussian() -> list[dict]:
    rows = []
    for tau in TAUS:
        theta = gaussian.simulate(1.0, tau, ETA, BATCH, updates=100, lag=0, chains=CHAINS, seed=7)
        exact = gaussian.mean_square(1.0, tau, ETA, BATCH, updates=100)
        rows.append({
            "tau": tau,
            "largest_stable_step": gaussian.largest_stable_step(tau, BATCH),
            "exact_mean_square_at_100": float(exact[-1]),
            "sampled_mean_square_of_the_last_50": float((theta[51:] ** 2).mean()),
            "chains_beyond_10": float((np.abs(theta).max(0) > 10).mean()),
        })
    return rows


def token_table(results: dict) -> list[str]:
    """The rows of README.md's first table: over the seeds, the range of what the seeds disagree on, else the mean."""
    rows = []
    for lag in LAGS:
        for stock in (False, True):
            found = [r["summary"] for r in results["tokens"]["runs"] if (r["lag"], r["stock"]) == (lag, stock)]

            def mean(key, found=found):
                return statistics.fmean(f[key] for f in found)

            peaks = [f["d3_peak_to_median"] for f in found]
            share = sum(f["differing_words"] for f in found) / sum(f["tokens"] for f in found)
            rows.append((
                f"| {lag} | {'stock' if stock else 'aligned'} | {min(peaks):.1f} to {max(peaks):.1f} "
                f"| {mean('kernel_k3_first_tenth'):.1e} | {mean('kernel_k3_last_tenth'):.1e} "
                f"| {mean('lag_k3_median'):.1e} | {share:.1%} | {max(f['max_weight'] for f in found):.1f} "
                f"| {mean('reward_first_tenth'):.2f} | {mean('reward_last_tenth'):.2f} |"
            ).replace("0.0e+00", "0").replace("0.0%", "0"))
    return rows


def gaussian_table(results: dict) -> list[str]:
    """The rows of README.md's second table."""
    return [
        f"| {r['tau']} | {r['largest_stable_step']:.2f} | {r['exact_mean_square_at_100']:.3g} "
        f"| {r['sampled_mean_square_of_the_last_50']:.3g} | {r['chains_beyond_10']:.2%} |"
        for r in results["gaussian"]["rows"]
    ]


def blocks(values: list[float]) -> np.ndarray:
    return np.asarray(values).reshape(-1, BLOCK).mean(1)


def draw(runs: list[dict], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    colours = {2: "tab:blue", 8: "tab:green", 64: "tab:purple"}
    middle = (np.arange(UPDATES // BLOCK) + 0.5) * BLOCK
    for run in (r for r in runs if r["seed"] == SEEDS[0] and r["lag"] == 2):
        a.semilogy(run["d3"], lw=0.6, color="tab:red" if run["stock"] else "tab:blue",
                   label=f"{'stock' if run['stock'] else 'aligned'}: peak / median "
                         f"{run['summary']['d3_peak_to_median']:.1f}")
    a.set(title="D3 of each update, lag 2, seed 0", xlabel="update")
    for lag in LAGS:
        curves = {stock: np.mean([blocks(r["kernel_k3"]) for r in runs if r["lag"] == lag and r["stock"] == stock], 0)
                  for stock in (False, True)}
        b.plot(middle, curves[True], color=colours[lag], label=f"stock, lag {lag}")
        b.plot(middle, curves[False], ":", color=colours[lag], label=f"aligned, lag {lag}")
        for stock in (False, True):
            reward = np.mean([blocks(r["reward"]) for r in runs if r["lag"] == lag and r["stock"] == stock], 0)
            c.plot(middle, reward, "--" if stock else "-", color=colours[lag],
                   label=f"{'stock' if stock else 'aligned'}, lag {lag}")
    b.set_yscale("symlog", linthresh=1e-6)
    b.set(title=f"kernel k3, mean of {BLOCK} updates and {len(SEEDS)} seeds (symlog: 0 is 0)", xlabel="update")
    c.set(title=f"reward, mean of {BLOCK} updates and {len(SEEDS)} seeds", xlabel="update")
    taus = np.linspace(0, 0.7, 200)
    d.plot(taus, [gaussian.largest_stable_step(t, BATCH) for t in taus], color="k")
    d.axhline(ETA, color="tab:red", ls="--", label=f"one step size, {ETA}")
    d.set(title=f"Gaussian policy, exact: largest stable step, batch {BATCH}", xlabel="mismatch tau", ylim=(0, 1.8))
    for axes in (a, b, c, d):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    torch.set_num_threads(1)
    runs = []
    for lag in LAGS:
        for stock in (False, True):
            for seed in SEEDS:
                runs.append(run_tokens(lag, stock, seed))
                print(lag, stock, seed, runs[-1]["summary"], file=sys.stderr, flush=True)
    results = {
        "made_with": {"torch": torch.__version__, "numpy": np.__version__, "machine": platform.machine()},
        "tokens": {
            "configuration": {"updates": UPDATES, "step": STEP, "responses": tokens.GROUPS * tokens.GROUP,
                              "tokens_a_response": tokens.LENGTH},
            "runs": [{k: run[k] for k in ("lag", "stock", "seed", "summary")} for run in runs],
        },
        "gaussian": {"configuration": {"eta": ETA, "batch": BATCH, "chains": CHAINS}, "rows": run_gaussian()},
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(runs, HERE / "simulation.png")
    print("\n".join(token_table(results) + gaussian_table(results)))


if __name__ == "__main__":
    main()
