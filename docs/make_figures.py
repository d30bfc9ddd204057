"""Draws docs/figures/proven.svg from the records in evidence/. `python docs/make_figures.py` (needs matplotlib).

The figure carries the sha256 of the records it was drawn from; tests/unit/test_figures.py fails when one has changed.
"""
import hashlib
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIGURE = ROOT / "docs" / "figures" / "proven.svg"
TRAIN = {"train-nemotron-3.5-lightning-tiny": ("Nemotron-H, BF16", "-"),
         "train-nemotron-3.5-lightning-tiny-quantised": ("Nemotron-H, FP8 and NVFP4", "--"),
         "train-deepseek-v4-tiny-train": ("DeepSeek-V4, FP8", ":")}
ON, OFF = "rollout-deepseek-v4-tiny", "contrast-deepseek-v4-tiny"
CASES = {"prefill-batched": "decode against\nprefill", "reversed": "other order\nof arrival",
         "twice": "the same run\nagain"}
BLUE, RED = "#1f6fb4", "#c23b22"


def path(name: str) -> pathlib.Path:
    return ROOT / "evidence" / f"{name}.json"


def digest(name: str) -> str:
    return hashlib.sha256(path(name).read_bytes()).hexdigest()


def rows(name: str) -> dict[str, dict]:
    return {row["case"]: row for row in json.loads(path(name).read_text())["rows"]}


def draw_training(axes) -> None:
    words = axes.twinx()
    for name, (label, style) in TRAIN.items():
        updates = [row for case, row in rows(name).items() if case.startswith("update")]
        steps = range(1, len(updates) + 1)
        axes.plot(steps, [row["reward"] for row in updates], style, color=BLUE, label=label)
        words.plot(steps, [row["scored"]["differing_words"] for row in updates], style, color=RED)
    axes.set(xlabel="update", ylabel="reward of the toy task", ylim=(0, 1.05))
    axes.yaxis.label.set_color(BLUE)
    axes.legend(loc="upper left", frameon=False)
    words.set(ylabel="differing words of 4,096", ylim=(-0.05, 1))
    words.set_yticks([0])
    words.yaxis.label.set_color(RED)
    axes.set_title("Rollout against trainer, three models")


def draw_contrast(axes) -> None:
    off, on = rows(OFF), rows(ON)
    for index, case in enumerate(CASES):
        for shift, side, color in ((-0.2, off, RED), (0.2, on, BLUE)):
            share = side[case]["differing_words"] / side[case]["tokens"]
            axes.bar(index + shift, share, 0.38, color=color)
            axes.text(index + shift, share + 0.02, f"{side[case]['differing_words']:,} of\n{side[case]['tokens']:,}",
                      ha="center", fontsize=7)
    axes.set_xticks(range(len(CASES)), CASES.values())
    axes.set(ylabel="share of differing words", ylim=(0, 1.25))
    axes.set_title("DeepSeek-V4: batch invariance off (red), on (blue)")


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "zero-mismatch", "font.size": 9}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    draw_training(left)
    draw_contrast(right)
    FIGURE.parent.mkdir(exist_ok=True)
    drawn_from = "\n".join(f"{name} {digest(name)}" for name in (*TRAIN, ON, OFF))
    figure.savefig(FIGURE, metadata={"Date": None, "Description": drawn_from})


if __name__ == "__main__":
    main()
