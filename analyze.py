"""
Is the depth used? Measures and figures of the DepthBench, LayerRoPE and Multi-Gate Residuals papers.

    python analyze.py table out/*                          # from run directories: table, curves, shapes, lr
    python analyze.py causal out/preln-L16 out/hc-L16      # from checkpoints, drawn side by side
    python analyze.py all out/mgr-L16 --samples 32         # every measure that the checkpoint allows

Each measure writes <out_dir>/<measure>.json (numbers, settings, sample counts), then <measure>.png.
z_0 is the embedding, z_l the representation after l blocks: `GPT.hidden`. L counts blocks, T tokens of a sequence.
"""
import argparse
import csv
import json
import math
import re
import sys
from pathlib import Path

import numpy as np

from train import fail

COLORS = { # one colour per architecture, in every figure; the order of tables and legends
    "preln": "#000000", "postln": "#7f7f7f", "sandwich": "#8c564b", "lns": "#c49c94", "deepnorm": "#bcbd22", "keel": "#808000",
    "hc": "#d62728", "hc_static": "#ff9896", "mhc": "#ff7f0e", "mhc_lite": "#ffbb78", "attnres": "#1f77b4", "attnres_block": "#17becf",
    "moda": "#2ca02c", "moda_postln": "#98df8a", "layerrope": "#9467bd", "layerrope_peri": "#c5b0d5", "mgr": "#e377c2", "mgr_independent": "#f7b6d2"}

def color(model):
    return COLORS.get(model, "#00ff00") # a model file of your own

def rank(model):
    return list(COLORS).index(model) if model in COLORS else len(COLORS), model

# -----------------------------------------------------------------------------
# Runs: what training left in out/<run>, whatever state it is in

# flags that do not make another experiment: runs that differ only here, in learning rate or in seed are compared and averaged
NEUTRAL = set("""seed learning_rate run_name out_dir resume dry_run preset device dtype compile fused ddp_backend micro_batch
    log_every eval_every save_every layer_stats_every wandb git_commit versions""".split())

def number(x):
    return float(x) if isinstance(x, (int, float)) else math.nan

def read_run(path):
    # {name, status, ...config, ...result, log: rows, bad_lines}; status finished, diverged, incomplete or missing
    path, run, config, rows = Path(path), {}, {}, {}
    for file in ("config.json", "result.json"):
        try:
            part = json.loads((path / file).read_text(encoding="utf-8"))
            run.update(part)
            config = config or part
        except (OSError, ValueError): # not written yet, or cut off
            pass
    text = (path / "log.jsonl").read_text(encoding="utf-8", errors="replace") if (path / "log.jsonl").is_file() else ""
    bad = 0
    for line in filter(str.strip, text.splitlines()):
        try:
            row = json.loads(re.sub(r"(?<=[\s:-])(nan|inf)(?=[\s,}])", lambda m: {"nan": "NaN", "inf": "Infinity"}[m[0]], line, flags=re.I))
            rows[row["step"], "val_loss" in row, "layer_stats" in row] = row # a resumed run repeats steps: the last one counts
        except (ValueError, KeyError, TypeError):
            bad += 1
    log = [rows[key] for key in sorted(rows)]
    run.setdefault("status", "incomplete" if run or log else "missing")
    evals = [row for row in log if "val_loss" in row]
    run["val_loss"] = number(run["val_loss"] if "val_loss" in run else evals[-1]["val_loss"] if evals else math.nan)
    if run["status"] == "finished" and not math.isfinite(run["val_loss"]):
        run["status"] = "diverged"
    for key, unknown in dict(model="?", n_layer=0, n_embd=0, learning_rate=math.nan, seed=-1, tokens=0, vocab_size=0).items():
        run[key] = unknown if run.get(key) is None else run[key]
    setting = tuple(sorted((k, str(v)) for k, v in config.items() if k not in NEUTRAL and not isinstance(v, (dict, list))))
    return dict(run, name=path.name, log=log, bad_lines=bad, setting=setting, last_step=log[-1]["step"] if log else 0)

def experiments(runs):
    # runs grouped by everything but learning rate and seed: [{model, n_layer, n_embd, label, runs, rates, best}]
    # rates: {lr: {mean, std, n, runs}} of finished and diverged runs, mean nan where any seed diverged; best: an lr, or None
    groups = {}
    for run in runs:
        if run["status"] != "missing":
            groups.setdefault((rank(run["model"]), run["n_layer"], run["n_embd"], run["setting"]), []).append(run)
    out = []
    for (_, L, d, setting), members in sorted(groups.items()):
        twins = [set(key[3]) for key in groups if key[1:3] == (L, d) and groups[key][0]["model"] == members[0]["model"]]
        extra = sorted(set(setting) - set.intersection(*twins)) # settings in which experiments of one model and shape differ
        rates = {}
        for lr in sorted({r["learning_rate"] for r in members}):
            done = [r for r in members if r["learning_rate"] == lr and r["status"] in ("finished", "diverged")]
            loss = np.array([r["val_loss"] if r["status"] == "finished" else math.nan for r in done])
            if done:
                rates[lr] = dict(mean=float(loss.mean()), std=float(loss.std(ddof=1)) if len(loss) > 1 else 0.0, n=len(loss), runs=done)
        stable = [lr for lr in rates if math.isfinite(rates[lr]["mean"])]
        label = " ".join([members[0]["model"]] + [f"{k}={v}" for k, v in extra])
        out.append(dict(model=members[0]["model"], n_layer=L, n_embd=d, label=label, runs=members, rates=rates,
                        best=min(stable, key=lambda lr: rates[lr]["mean"], default=None)))
    return out

def cell(e, lr, bare=False):
    r = e["rates"][lr]
    if not math.isfinite(r["mean"]):
        return "diverged"
    return f"{r['mean']:.4f}" + (f" ± {r['std']:.4f}" if r["n"] > 1 else "") + (f" (n {r['n']})" if r["n"] > 1 or not bare else "")

def result_cell(e):
    # the experiment's result at its best learning rate, in words where there is none
    unfinished = [r for r in e["runs"] if r["status"] == "incomplete"]
    if e["best"] is not None:
        return cell(e, e["best"], bare=True)
    return "diverged" if e["rates"] else f"incomplete at step {max(r['last_step'] for r in unfinished)}"

def markdown(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head)] + rows) + "\n"

def table(runs, args):
    # best learning rate and loss of every experiment, as Markdown; every single run as --csv
    es = experiments(runs)
    shapes, labels = sorted({(e["n_layer"], e["n_embd"]) for e in es}), list(dict.fromkeys(e["label"] for e in es))
    at = {(e["label"], e["n_layer"], e["n_embd"]): e for e in es}
    print("Validation loss in nats per token, at the best learning rate of each cell (mean ± standard deviation over n seeds)\n")
    print(markdown(["model"] + [f"L {L}, d {d}" for L, d in shapes],
                   [[name] + [result_cell(at[name, *s]) if (name, *s) in at else "" for s in shapes] for name in labels]))
    rows = []
    for e in es:
        rates = [f"{lr:g}: {cell(e, lr, bare=True)}" for lr in e["rates"] if lr != e["best"]]
        rates += [f"{r['learning_rate']:g}: incomplete at step {r['last_step']}" for r in e["runs"] if r["status"] == "incomplete"]
        n = e["rates"][e["best"]]["n"] if e["best"] is not None else 0
        rows.append([e["label"], e["n_layer"], e["n_embd"], f"{max(r.get('n_params', 0) for r in e['runs']):,}",
                     f"{max(r.get('n_params_depth', 0) for r in e['runs']):,}", f"{max(r['tokens'] for r in e['runs']):,}",
                     "" if e["best"] is None else f"{e['best']:g}", result_cell(e), n, "; ".join(rates)])
    print(markdown("model, L, d, parameters, of them for depth, tokens, learning rate, validation loss, n, other learning rates".split(", "), rows))
    for run in runs:
        if run["status"] == "missing":
            print(f"missing: {run['name']}")
    if args.csv:
        fields = "model n_layer n_embd n_params n_params_depth learning_rate seed tokens val_loss seconds status name".split()
        with open(args.csv, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, fields, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(runs, key=lambda r: (rank(r["model"]), r["n_layer"], r["n_embd"], r["learning_rate"], r["seed"])))

def save(args, measure, result, fig=None):
    # JSON, then PNG: numbers survive whatever happens to the figure
    out = Path(args.out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
        settings = {k: v for k, v in vars(args).items() if k not in ("measure", "paths", "csv", "out_dir")}
        (out / f"{measure}.json").write_text(json.dumps(dict(measure=measure, settings=settings, **result), indent=1) + "\n", encoding="utf-8")
        print(out / f"{measure}.json")
        if fig:
            fig.savefig(out / f"{measure}.png", dpi=130)
            print(out / f"{measure}.png")
    except OSError as e:
        fail(f"--out_dir: {out}: {e.strerror}")

def figure(rows, columns, width=4.6, height=3.6):
    import matplotlib
    matplotlib.use("Agg") # no display needed
    import matplotlib.pyplot as plt
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained")

def legend(fig, axes):
    # one legend under the figure: each architecture once
    handles = {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels())}
    if handles:
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 6), fontsize=8)

def by_shape(es):
    shapes = sorted({(e["n_layer"], e["n_embd"]) for e in es})
    return {shape: [e for e in es if (e["n_layer"], e["n_embd"]) == shape] for shape in shapes}

def curves(runs, args):
    # training loss (thin) and validation loss (points) against tokens, each experiment at its best rate; one panel per shape
    panels = by_shape(experiments(runs))
    fig, axes = figure(1, max(len(panels), 1))
    data = []
    for ax, ((L, d), es) in zip(axes[0], panels.items()):
        for e in es:
            for run in e["runs"] if e["best"] is None else e["rates"][e["best"]]["runs"]:
                train = [(number(r.get("tokens")), number(r["loss"])) for r in run["log"] if "loss" in r]
                val = [(number(r.get("tokens")), number(r["val_loss"])) for r in run["log"] if "val_loss" in r]
                label = e["label"] + {"finished": "", "diverged": " (diverged)", "incomplete": " (incomplete)"}[run["status"]]
                ax.plot(*np.array(train or [(math.nan,) * 2]).T, color=color(e["model"]), lw=0.6, alpha=0.4)
                ax.plot(*np.array(val or [(math.nan,) * 2]).T, color=color(e["model"]), lw=1.2, marker=".", label=label)
                data.append(dict(name=run["name"], model=e["model"], n_layer=L, n_embd=d, status=run["status"], train=train, val=val))
        ax.set(title=f"L {L}, d {d}", xlabel="training tokens", ylabel="loss (nats per token)")
    legend(fig, axes)
    save(args, "curves", dict(runs=data), fig)

def shapes(runs, args):
    # validation loss at the best rate against the aspect ratio d/L, as in DepthBench's Figure 2
    es = [e for e in experiments(runs) if e["n_layer"]]
    fig, axes = figure(1, 1, 7, 4.6)
    ax, data = axes[0, 0], []
    for label in dict.fromkeys(e["label"] for e in es):
        line = [e for e in es if e["label"] == label]
        best = [e["rates"].get(e["best"], dict(mean=math.nan, std=0.0, n=0)) for e in line]
        ratio = [e["n_embd"] / e["n_layer"] for e in line]
        ax.errorbar(ratio, [b["mean"] for b in best], [b["std"] for b in best], color=color(line[0]["model"]), marker="o", ms=4, capsize=3, label=label)
        failed = [r for r, e in zip(ratio, line) if e["best"] is None and e["rates"]]
        ax.plot(failed, [0.98] * len(failed), "x", color=color(line[0]["model"]), transform=ax.get_xaxis_transform())
        data += [dict(label=label, n_layer=e["n_layer"], n_embd=e["n_embd"], learning_rate=e["best"], result=result_cell(e),
                      mean=b["mean"], std=b["std"], n=b["n"]) for e, b in zip(line, best)]
    ax.set_xscale("log")
    ax.invert_xaxis()
    ticks = {e["n_embd"] / e["n_layer"]: f"{e['n_embd'] / e['n_layer']:.3g}\nL {e['n_layer']}" for e in es}
    ax.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    ax.minorticks_off()
    ax.set(xlabel="aspect ratio d / L: wide and shallow to narrow and deep", ylabel="validation loss (nats per token)",
           title="best learning rate; bars: standard deviation over seeds; x: every rate diverged")
    legend(fig, axes)
    save(args, "shapes", dict(points=data), fig)

def lr(runs, args):
    # loss against learning rate, and LR sensitivity (LayerRoPE, Table 9): the mean of min(L(lr), ln V) - min L over the rates
    # that all experiments of one shape have; a diverged run counts as ln V; stable: at most one nat above the best
    panels = by_shape(experiments(runs))
    fig, axes = figure(1, max(len(panels), 1))
    data = []
    for ax, ((L, d), es) in zip(axes[0], panels.items()):
        swept = [e for e in es if e["best"] is not None and len(e["rates"]) > 1]
        common = set.intersection(*[set(e["rates"]) for e in swept]) if swept else set()
        for e in es:
            rates = sorted(e["rates"])
            means = [e["rates"][r]["mean"] for r in rates]
            ax.errorbar(rates, means, [e["rates"][r]["std"] for r in rates], color=color(e["model"]), marker="o", ms=4, capsize=3, label=e["label"])
            failed = [r for r in rates if not math.isfinite(e["rates"][r]["mean"])]
            ax.plot(failed, [0.97] * len(failed), "x", color=color(e["model"]), transform=ax.get_xaxis_transform())
            uniform = math.log(e["runs"][0]["vocab_size"] or 1)
            capped = {r: float(np.mean([min(run["val_loss"], uniform) if run["status"] == "finished" else uniform for run in e["rates"][r]["runs"]])) for r in rates}
            least = min((m for m in means if math.isfinite(m)), default=math.nan)
            mean = lambda over: float(np.mean([capped[r] - least for r in over])) if over and math.isfinite(least) else math.nan
            stable = [r for r, m in zip(rates, means) if m <= least + 1]
            data.append(dict(label=e["label"], n_layer=L, n_embd=d, rates=rates, means=means, best_rate=e["best"], best_loss=least, uniform_loss=uniform,
                             largest_stable_rate=max(stable, default=None), largest_swept=max(rates, default=None),
                             sensitivity=mean(sorted(common)), common_rates=sorted(common), sensitivity_own_rates=mean(rates)))
        ax.set(xscale="log", title=f"L {L}, d {d} (x: diverged)", xlabel="peak learning rate", ylabel="validation loss (nats per token)")
    legend(fig, axes)
    save(args, "lr", dict(sweeps=data), fig)
    print(markdown("model, L, d, best rate, loss, largest stable rate, LR sensitivity, over rates, over its own rates".split(", "),
                   [[s["label"], s["n_layer"], s["n_embd"], s["best_rate"] or "", f"{s['best_loss']:.4f}", s["largest_stable_rate"] or "",
                     f"{s['sensitivity']:.4f}", " ".join(f"{r:g}" for r in s["common_rates"]), f"{s['sensitivity_own_rates']:.4f}"] for s in data]))

RUN_MEASURES = {"table": table, "curves": curves, "shapes": shapes, "lr": lr}

def main(argv=None):
    parser = argparse.ArgumentParser(prog="analyze.py", allow_abbrev=False)
    parser.error = lambda message: fail(message, 2)
    parser.add_argument("measure", choices=list(RUN_MEASURES))
    parser.add_argument("paths", nargs="+", help="run directories")
    parser.add_argument("--out_dir", default="out/analysis", help="where JSON and PNG go")
    parser.add_argument("--csv", help="table: write one row per run to this file")
    args = parser.parse_args(argv)
    if args.measure in RUN_MEASURES:
        RUN_MEASURES[args.measure]([read_run(path) for path in args.paths], args)
    return 0

if __name__ == "__main__":
    sys.exit(main())
