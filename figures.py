"""
Tables and figures of runs, and how every figure here is drawn. `python analyze.py table|curves|shapes|lr out/*` shows them.

A run is what training left in out/<run>, whatever state it is in; an experiment, the runs that differ in learning rate and seed only.
"""
import contextlib
import csv
import itertools
import json
import math

import numpy as np

from train import NOT_THE_RUN, fail, read_json

COLORS = { # one colour per architecture in every figure, and the order of tables and legends; any other name is magenta
    "preln": "#000000", "postln": "#7f7f7f", "sandwich": "#8c564b", "lns": "#c49c94", "deepnorm": "#b5a642", "keel": "#6b6b00",
    "hc": "#d55e00", "hc_static": "#f2a679", "mhc": "#e69f00", "mhc_lite": "#f5d28a", "attnres": "#0072b2", "attnres_block": "#56b4e9",
    "moda": "#009e73", "moda_postln": "#80cfb9", "layerrope": "#7a3fb0", "layerrope_peri": "#bfa0de", "mgr": "#cc79a7", "mgr_independent": "#e8c3d7"}
MARKERS = "osD^v<>>PPdhXX**pp8" # and a marker for each family, in the same order: nothing hangs on colour alone

# -----------------------------------------------------------------------------
# Runs: what training left in out/<run>, whatever state it is in

def read_run(path):
    # the fields of config.json, log.jsonl and result.json, the later winning; status finished, diverged, incomplete or missing
    config, result, log, rows = read_json(path / "config.json"), read_json(path / "result.json"), path / "log.jsonl", {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError): # a line cut off, a warning in between
            row = json.loads(line)
            rows[row["step"], "val_loss" in row] = row # of a step logged twice, the last
    run = dict(model="?", n_layer=0, n_embd=0, learning_rate=math.nan, seed=-1, step=0, vocab_size=1, n_params=0, n_params_depth=0, tokens=0,
               val_loss=math.nan, status="incomplete" if config or rows else "missing")
    kinds, lines = {k: str if isinstance(v, str) else (int, float) for k, v in run.items()}, [rows[key] for key in sorted(rows)]
    for part in (config, *lines, result): # what is not of its kind is as good as missing
        run.update({k: v for k, v in part.items() if v is not None and isinstance(v, kinds.get(k, object))})
    run.update(name=path.name, panel=f"L{run['n_layer']} d{run['n_embd']}", log=lines)
    run["setting"] = {(k, str(v)) for k, v in config.items() if k not in NOT_THE_RUN | {"seed", "learning_rate"}}
    return run if run["status"] != "finished" or math.isfinite(run["val_loss"]) else dict(run, status="diverged")

def experiments(runs):
    # runs that differ in learning rate and seed only, together: [{model, n_layer, n_embd, panel, label, runs, rates, best, result}]
    # rates: {lr: {mean, std, n, runs}} of finished and diverged runs, mean nan where a seed diverged; best: the one of the least mean
    place = lambda run: ((*COLORS, run["model"]).index(run["model"]), run["model"], run["n_layer"], run["n_embd"])
    groups, out = {}, []
    for run in sorted((r for r in runs if r["status"] != "missing"), key=lambda r: (*place(r), r["learning_rate"], r["seed"])):
        groups.setdefault((place(run), frozenset(run["setting"])), []).append(run)
    told = {(a[1], k) for a, s in groups for b, t in groups if a == b for k, _ in s ^ t} # what differs between experiments of one model and shape
    for (_, setting), members in groups.items():
        first, rates = members[0], {}
        for lr, same in itertools.groupby((r for r in members if r["status"] != "incomplete"), key=lambda r: r["learning_rate"]):
            same = list(same)
            loss = np.array([r["val_loss"] if r["status"] == "finished" else math.nan for r in same])
            rates[lr] = dict(mean=loss.mean().item(), std=loss.std(ddof=1).item() if len(loss) > 1 else 0.0, n=len(loss), runs=same)
        best = min((lr for lr, r in rates.items() if math.isfinite(r["mean"])), key=lambda lr: rates[lr]["mean"], default=None)
        result = cell(rates[best]) if best is not None else "diverged" if rates else f"incomplete at step {max(r['step'] for r in members)}"
        label = " ".join([first["model"]] + [f"{k}={v}" for k, v in sorted(setting) if (first["model"], k) in told])
        out.append(dict({k: first[k] for k in ("model", "n_layer", "n_embd", "panel")}, label=label, runs=members, rates=rates, best=best, result=result))
    return out or fail("no run in these directories")

def cell(r):
    return "diverged" if not math.isfinite(r["mean"]) else f"{r['mean']:.4f}" + (f" ± {r['std']:.4f} (n {r['n']})" if r["n"] > 1 else "")

def markdown(head, rows):
    print("\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n")

def table(runs, args):
    # Markdown: the losses at a glance, then every experiment with all its rates; --csv: every run
    if args.csv:
        fields = "model n_layer n_embd n_params n_params_depth learning_rate seed tokens val_loss seconds status name".split()
        with open(args.csv, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, fields, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(runs, key=lambda r: [r[k] for k in ("model", "n_layer", "n_embd", "learning_rate", "seed")]))
    print("".join(f"missing: {run['name']}\n" for run in runs if run["status"] == "missing"), end="")
    es, rows = experiments(runs), []
    shapes = dict.fromkeys(e["panel"] for e in sorted(es, key=lambda e: (e["n_layer"], e["n_embd"])))
    at = {(e["label"], e["panel"]): e["result"] for e in es}
    print("Validation loss (nats per token) at the best learning rate, mean ± standard deviation over n seeds\n")
    markdown(["model", *shapes], [[label] + [at.get((label, s), "") for s in shapes] for label in dict.fromkeys(e["label"] for e in es)])
    for e in es:
        others = [f"{lr:g}: {cell(r)}" for lr, r in e["rates"].items() if lr != e["best"]]
        others += [f"{r['learning_rate']:g}: incomplete at step {r['step']}" for r in e["runs"] if r["status"] == "incomplete"]
        counts = [f"{max(r[k] for r in e['runs']):,}" for k in ("n_params", "n_params_depth", "tokens")]
        rows.append([e["label"], e["n_layer"], e["n_embd"], *counts, e["best"] or "", e["result"], "; ".join(others)])
    markdown(["model", "L", "d", "parameters", "of these for depth", "tokens", "learning rate", "validation loss", "other learning rates"], rows)

def curves(runs, args):
    # every run at its experiment's best rate; at all rates where there is none
    for e in experiments(runs):
        for run in e["runs"] if e["best"] is None else e["rates"][e["best"]]["runs"]:
            line = {f"{k}{t}": [r.get(t or k, math.nan) for r in run["log"] if k in r] for k in ("loss", "val_loss") for t in ("tokens", "")}
            label = e["label"] + f" ({run['status']})" * (run["status"] != "finished")
            yield dict(model=e["model"], panel=e["panel"], label=label, name=run["name"], **line)

def shapes(runs, args):
    # a line per model over d/L, at the best rate (DepthBench, Figure 2)
    none = dict(mean=math.nan, std=0.0, n=0)
    es = [dict(e, x=e["n_embd"] / e["n_layer"], **e["rates"].get(e["best"], none)) for e in experiments(runs) if e["n_layer"]]
    for label in dict.fromkeys(e["label"] for e in es):
        line = [e for e in es if e["label"] == label]
        columns = {name: [e[k] for e in line] for name, k in dict(x="x", loss="mean", loss_error="std", n="n", rate="best", shape="panel").items()}
        yield dict(label=label, model=line[0]["model"], lost=[e["x"] for e in line if e["rates"] and not e["n"]], **columns)

def lr(runs, args):
    # LR sensitivity S (LayerRoPE, Table 9): the mean of min(L(rate), ln V) - min L over the rates that all sweeps of one shape share, where that
    # is more than one; a diverged run counts as ln V. Stable: at most one nat above the best
    es, out = [e for e in experiments(runs) if e["rates"]], []
    for e in es:
        rates, cap, least = e["rates"], math.log(e["runs"][0]["vocab_size"]), e["rates"][e["best"]]["mean"] if e["best"] else math.nan
        shared = sorted(set.intersection(*(set(f["rates"]) for f in es if f is e or f["panel"] == e["panel"] and len(f["rates"]) > 1)))
        excess = [np.mean([min(run["val_loss"], cap) if run["status"] == "finished" else cap for run in rates[r]["runs"]]) - least for r in shared]
        out.append(dict({k: e[k] for k in ("label", "panel", "model", "best")}, x=list(rates), loss=[r["mean"] for r in rates.values()],
                        loss_error=[r["std"] for r in rates.values()], lost=[r for r in rates if not math.isfinite(rates[r]["mean"])],
                        least=least, uniform=cap, shared=shared, sensitivity=np.mean(excess).item() if len(shared) > 1 else math.nan,
                        stable=max((r for r in rates if rates[r]["mean"] <= least + 1), default=None)))
    markdown(["model", "shape", "best rate", "loss", "largest stable rate", "LR sensitivity", "over rates"], [[s["label"], s["panel"], s["best"],
             f"{s['least']:.4f}", s["stable"], f"{s['sensitivity']:.4f}", " ".join(f"{r:g}" for r in s["shared"])] for s in out])
    return out

# -----------------------------------------------------------------------------
# Drawing

LOSS, PASSED, READER, ANGLE = "loss (nats per token)", "blocks passed", "reading sub-layer (two a block)", "angular distance / pi"
LATE = "line", "fractions", "pairs of the last 3/4 of the blocks", "threshold", "fraction of pairs above it", "thresholds"
FIGURES = { # measure: (title, panels); a panel as draw() has it
    "curves": ("Loss during training", [
        ("line", "loss", "training", "tokens", LOSS, "losstokens"),
        ("line", "val_loss", "validation", "tokens", LOSS, "val_losstokens")]),
    "shapes": ("Validation loss at the best learning rate (bars: seeds; x: diverged)", [
        ("line logx flip", "loss", "", "width / depth, from wide to deep", LOSS, "x")]),
    "lr": ("Validation loss over the learning rate (bars: seeds; x: diverged)", [
        ("line logx", "loss", "", "peak learning rate", LOSS, "x")]),
    "angular": ("Angle between the states after l and after l + n blocks (0: same direction, 0.5: orthogonal)", [
        ("map", "distance", ANGLE, "l", "n", (0, 1)),
        ("line", "profile", "mean over l", "n", ANGLE, 1)]),
    "streams": ("Every residual stream: angle between l and l + n blocks, and its largest entry", [
        ("map by stream", "distance", ANGLE, "l", "n", (0, 1)),
        ("line by stream", "profile", "mean over l", "n", ANGLE, 1),
        ("line logy by stream", "largest", "", READER, "largest absolute entry", 0)]),
    "causal": ("Change of the update of block l when block s is skipped, relative to the update", [
        ("map", "scores", "causal score", "updated block l", "skipped block s", (0, 0)), LATE]),
    "permutation": ("Change of the loss when blocks i and j change places, relative to the loss", [
        ("map", "scores", "permutation score", "block j", "block i", (0, 0)), LATE]),
    "prune": ("What a skipped block costs", [
        ("line", "loss_change", "", "skipped block", "gain in " + LOSS, 0),
        ("line", "perplexity_change", "", "skipped block", "gain in perplexity", 0),
        ("line", "accuracy_change", "", "skipped block", "change of accuracy", 0)]),
    "lens": ("Distance of the prediction after every block from the final one", [
        ("line", "kl", "", PASSED, "KL divergence (nats per token)", 0)]),
    "paths": ("Weight of every earlier output in what a sub-layer reads", [
        ("map own", "weights", "weight", "source (0: embedding)", READER, (0, 0))]),
    "transport": ("Products of the residual maps between streams (bars: 95 % bootstrap over windows)", [
        ("line", "effective_rank", "", PASSED, "effective rank", 0),
        ("line", "cosine", "", PASSED, "mean |cosine| between streams", 0),
        ("line logy", "singular_values", "all blocks", "index", "singular value / largest", 1)]),
    "block_mix": ("Softmax weight on the sum of the open source (gaps: none is open)", [
        ("line", "running_sum", "", READER, "weight", 1)]),
    "gates": ("Write gates: how much of an output each stream takes in", [
        ("map", "distribution", "fraction of gates", "gating sub-layer", "gate (hundredths)", (0, 0)),
        ("line by stream", "mean", "", "gating sub-layer", "mean gate", 0),
        ("line", "largest", "over all streams", "gating sub-layer", "largest gate", 0)]),
    "variance": ("Size of the state", [
        ("line logy", "variance", "position 0 left out", PASSED, "variance", 0),
        ("line logy", "norm", "", PASSED, "mean norm", 0)]),
    "massive": ("The three largest absolute entries", [
        ("line logy by top", "largest_hidden", "state", PASSED, "absolute value", 0),
        ("line logy by top", "largest_attn", "output of attention", "block", "absolute value", 0),
        ("line logy by top", "largest_mlp", "output of MLP", "block", "absolute value", 0)]),
    "grads": ("Gradient of the mean loss with respect to the weights", [
        ("line logy", "gradient", "", "block", "norm", 0)]),
    "schedule": ("LayerRoPE's learned depth code", [
        ("line logy", "multiplier", "magnitude", "block", "multiplier exp(r)", 0),
        ("line", "rotation", "rotation of the fastest pair", "block", "degrees", 0)]),
    "norms": ("Gains of the norms, block by block", [
        ("map free", "dimensions", "gain", "block", "dimension", (0, 0)),
        ("line", "mean", "mean over dimensions", "block", "gain", 0),
        ("line", "q95", "95 % quantile", "block", "gain", 0),
        ("line", "ratio", "size", "block", "norm / norm of the first", 0),
        ("line", "angle", "angle in the MDS plane", "block", "degrees", 0)]),
    "cost": ("Cost of a prefill", [
        ("line logx flip", "flops", "", "width / depth", "FLOPs of a sequence", "ratio"),
        ("line logx flip", "kv_bytes", "", "width / depth", "KV cache of a sequence (bytes)", "ratio"),
        ("line logx flip", "peak_bytes", "", "width / depth", "peak memory (bytes)", "ratio"),
        ("line logx flip", "seconds", "", "width / depth", "time (s)", "ratio")])}

def parts(run, kind, key): # [(label, numbers)] of one run, which may hold several by name or by number; over a map the name has its own line
    values, word = run[key], kind.partition(" by ")[2]
    named = values.items() if isinstance(values, dict) else [(f"{word} {i}", v) for i, v in enumerate(values, 1)] if word else [("", values)]
    gap = "\n" if kind.startswith("map") else " "
    return [(f"{run['label']}{gap}{name}".strip(), np.array(v, float)) for name, v in named]

def draw_lines(ax, panel, runs):
    kind, key, _, _, _, first = panel
    models = [r["model"] for r in runs]
    for n, r in enumerate(runs):
        color, marker = COLORS.get(r["model"], "magenta"), MARKERS[[*COLORS, r["model"]].index(r["model"])]
        ax.plot(r.get("lost", []), [0.97] * len(r.get("lost", [])), "x", color=color, transform=ax.get_xaxis_transform())
        for i, (label, v) in enumerate(parts(r, kind, key), models[:n].count(r["model"])): # another dash for the next of one model
            x, error = r[first] if isinstance(first, str) else range(first, first + len(v)), r.get(f"{key}_error")
            ax.errorbar(x, v, error if error is None else np.array(error, float), color=color, ls=("-", "--", ":", "-.")[i % 4],
                        lw=1, marker=marker, ms=4 if len(v) < 40 else 0, mfc=color if i % 2 == 0 else "white", capsize=2, label=label)
    ax.set(xscale="log" if "logx" in kind else "linear", yscale="log" if "logy" in kind else "linear")
    ax.grid(alpha=0.3)
    if "logx" in kind:
        ticks = sorted({x for r in runs for x in r[first]})
        ax.set_xticks(ticks, [f"{x:.3g}" for x in ticks], rotation=45 if len(ticks) > 4 else 0)
        ax.minorticks_off()
        ax.xaxis.set_inverted("flip" in kind)
    elif isinstance(first, int):
        ax.xaxis.get_major_locator().set_params(integer=True)

def draw_map(ax, panel, v, every):
    # the scale ends at the 99 % quantile of every number that it is for; rows of zeros at the top are left out
    kind, *_, (x, y) = panel
    v = v[:1 + np.flatnonzero(v.any(axis=1)).max(initial=0)]
    every = np.append(every, [] if "free" in kind else [0, 1e-9])
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    return ax.imshow(v, origin="lower", aspect="auto", interpolation="nearest", vmin=np.nanmin(every), vmax=np.nanquantile(every, 0.99),
                     extent=(x - 0.5, x + v.shape[1] - 0.5, y - 0.5, y + v.shape[0] - 0.5))

def draw(title, panels, runs):
    """
    A matplotlib figure: a map for each run, all on one scale (own: each on its own), then the lines of all runs of one panel.

    runs: dicts with model, label, perhaps panel, and the numbers by key. panels: (kind, key, title, x label, y label, first) with
    kind: map (own; free: its scale need not hold 0) or line (logx, logy, flip), then "by x" where a run has an x more than one of;
    first: the first x, (x, y) of a map, or the key of x. A line has bars where the run has <key>_error, a cross at every x of "lost".
    """
    from matplotlib.figure import Figure # no pyplot: needs no display, keeps no figure
    panels = [panel for panel in panels if panel[1] in runs[0]]
    groups = {name: [r for r in runs if r.get("panel") == name] for name in dict.fromkeys(r.get("panel") for r in runs)}
    blocks = [[(p, label, v) for r in runs for label, v in parts(r, p[0], p[1])] for p in panels if p[0].startswith("map")]
    blocks += [[(p, ": ".join(filter(None, (name, p[2]))), rs) for p in panels if p[0].startswith("line") for name, rs in groups.items()]]
    blocks = [block for block in blocks if block]
    columns = min(4, max(map(len, blocks)))
    rows = [-(-len(block) // columns) for block in blocks]
    fig = Figure(figsize=(max(8, 4 * columns), 3.4 * sum(rows)), layout="constrained")
    fig.suptitle(title, fontsize=14)
    for part, block, n in zip(np.ravel(fig.subfigures(len(blocks), 1, squeeze=False, height_ratios=rows)), blocks, rows):
        axes = part.subplots(n, min(columns, len(block)), squeeze=False).ravel()
        for ax in axes[len(block):]:
            ax.remove()
        for ax, (panel, name, content) in zip(axes, block):
            ax.set(title=name, xlabel=panel[3], ylabel=panel[4])
            if panel[0].startswith("line"):
                draw_lines(ax, panel, content)
                continue
            own = "own" in panel[0]
            image = draw_map(ax, panel, content, np.concatenate([np.ravel(v) for *_, v in block if v is content or not own]))
            if own or ax is axes[len(block) - 1]:
                part.colorbar(image, ax=ax if own else list(axes[:len(block)]), label=panel[2], extend="max")
    handles = {label: h for ax in fig.axes for h, label in zip(*ax.get_legend_handles_labels())}
    fig.set_figheight(fig.get_figheight() + 0.7 + 0.2 * -(-len(handles) // 4)) # room for title and legend
    if handles:
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return fig
