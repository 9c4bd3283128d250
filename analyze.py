"""
Is the depth used? Measures and figures of the DepthBench, LayerRoPE and Multi-Gate Residuals papers.

    python analyze.py table out/*                          # from run directories: table, curves, shapes, lr
    python analyze.py causal out/preln-L16 out/hc-L16      # from checkpoints, side by side; by default on their validation data
    python analyze.py all out/mgr-L16 --samples 32         # every measure that the checkpoints allow
    python analyze.py norms model.safetensors --pattern 'layers\\.\\d+\\.post_attention_layernorm\\.weight'

Each measure writes <out_dir>/<measure>.json (numbers, settings, sample counts), then <measure>.png.
z_0 is the embedding, z_l the representation after l blocks (GPT.hidden), u_l = z_{l+1} - z_l; k counts the 2L sub-layers.
"""
import argparse
import contextlib
import csv
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from train import NOT_THE_RUN, Loader, fail, load_checkpoint, read_json

COLORS = { # one colour per architecture in every figure, and the order of tables and legends; any other name is lime
    "preln": "#000000", "postln": "#7f7f7f", "sandwich": "#8c564b", "lns": "#c49c94", "deepnorm": "#bcbd22", "keel": "#808000",
    "hc": "#d62728", "hc_static": "#ff9896", "mhc": "#ff7f0e", "mhc_lite": "#ffbb78", "attnres": "#1f77b4", "attnres_block": "#17becf",
    "moda": "#2ca02c", "moda_postln": "#98df8a", "layerrope": "#9467bd", "layerrope_peri": "#c5b0d5", "mgr": "#e377c2", "mgr_independent": "#f7b6d2"}

# -----------------------------------------------------------------------------
# Runs: what training left in out/<run>, whatever state it is in

def read_run(path):
    # the fields of config.json, log.jsonl and result.json, the later winning; status finished, diverged, incomplete or missing
    config, result, log, rows = read_json(path / "config.json"), read_json(path / "result.json"), path / "log.jsonl", {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError): # a line cut off, a warning in between
            row = json.loads(re.sub(r"(?<=[\s:-])(nan|inf)(?=[\s,}])", lambda m: {"n": "NaN", "i": "Infinity"}[m[0][0].lower()], line, flags=re.I))
            rows[row["step"], "val_loss" in row] = row # of a step logged twice, the last
    rows = [rows[key] for key in sorted(rows)]
    run = dict(model="?", n_layer=0, n_embd=0, learning_rate=math.nan, seed=-1, step=0, vocab_size=1, n_params=0, n_params_depth=0, tokens=0, val_loss=math.nan)
    run["status"] = "incomplete" if config or rows else "missing"
    for part in (config, *rows, result):
        run.update({k: v for k, v in part.items() if v is not None})
    run.update(name=path.name, log=rows, setting={(k, str(v)) for k, v in config.items() if k not in NOT_THE_RUN | {"seed", "learning_rate"}})
    return run if run["status"] != "finished" or math.isfinite(run["val_loss"]) else dict(run, status="diverged")

def experiments(runs):
    # runs that differ in learning rate and seed only, together: [{model, n_layer, n_embd, label, panel, runs, rates, best, result}]
    # rates: {lr: {mean, std, n, runs}} of finished and diverged runs, mean nan where a seed diverged; best: the one of the least mean
    place = lambda run: ((*COLORS, run["model"]).index(run["model"]), run["model"], run["n_layer"], run["n_embd"])
    groups, out = {}, []
    for run in sorted((r for r in runs if r["status"] != "missing"), key=lambda r: (*place(r), r["learning_rate"], r["seed"])):
        groups.setdefault((place(run), frozenset(run["setting"])), []).append(run)
    told = {(a[1], k) for a, s in groups for b, t in groups if a == b for k, _ in s ^ t} # what differs between experiments of one model and shape
    for ((_, model, L, d), setting), members in groups.items():
        rates, label = {}, " ".join([model] + [f"{k}={v}" for k, v in sorted(setting) if (model, k) in told])
        for lr, same in itertools.groupby((r for r in members if r["status"] != "incomplete"), key=lambda r: r["learning_rate"]):
            same = list(same)
            loss = np.array([r["val_loss"] if r["status"] == "finished" else math.nan for r in same])
            rates[lr] = dict(mean=loss.mean().item(), std=loss.std(ddof=1).item() if len(loss) > 1 else 0.0, n=len(loss), runs=same)
        best = min((lr for lr, r in rates.items() if math.isfinite(r["mean"])), key=lambda lr: rates[lr]["mean"], default=None)
        result = cell(rates[best]) if best is not None else "diverged" if rates else f"incomplete at step {max(r['step'] for r in members)}"
        out.append(dict(model=model, n_layer=L, n_embd=d, label=label, panel=f"L{L} d{d}", runs=members, rates=rates, best=best, result=result))
    return out or fail("no run in these directories")

def cell(r):
    return "diverged" if not math.isfinite(r["mean"]) else f"{r['mean']:.4f}" + (f" ± {r['std']:.4f} (n {r['n']})" if r["n"] > 1 else "")

def markdown(head, rows):
    print("\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head.split(", "), ["---"] * len(head.split(", ")), *rows]) + "\n")

def table(runs, args):
    # Markdown: the losses at a glance, then every experiment with all its rates; --csv: every run
    fields, rows = "model n_layer n_embd n_params n_params_depth learning_rate seed tokens val_loss seconds status name".split(), []
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, fields, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(runs, key=lambda r: [r[k] for k in ("model", "n_layer", "n_embd", "learning_rate", "seed")]))
    print("".join(f"missing: {run['name']}\n" for run in runs if run["status"] == "missing"), end="")
    es = experiments(runs)
    for e in es:
        others = [f"{lr:g}: {cell(r)}" for lr, r in e["rates"].items() if lr != e["best"]]
        others += [f"{r['learning_rate']:g}: incomplete at step {r['step']}" for r in e["runs"] if r["status"] == "incomplete"]
        top = [f"{max(r[k] for r in e['runs']):,}" for k in ("n_params", "n_params_depth", "tokens")]
        rows.append([e["label"], e["n_layer"], e["n_embd"], *top, e["best"] or "", e["result"], "; ".join(others)])
    shapes = dict.fromkeys(e["panel"] for e in sorted(es, key=lambda e: (e["n_layer"], e["n_embd"])))
    at = {(e["label"], e["panel"]): e["result"] for e in es}
    print("Validation loss (nats per token) at the best learning rate, mean ± standard deviation over n seeds\n")
    markdown(", ".join(["model", *shapes]), [[name] + [at.get((name, s), "") for s in shapes] for name in dict.fromkeys(e["label"] for e in es)])
    markdown("model, L, d, parameters, of these for depth, tokens, learning rate, validation loss, other learning rates", rows)

def curves(runs, args):
    # every run at its experiment's best rate; at all rates where there is none
    for e in experiments(runs):
        for run in e["runs"] if e["best"] is None else e["rates"][e["best"]]["runs"]:
            line = {f"{k}{t}": [r.get(t or k, math.nan) for r in run["log"] if k in r] for k in ("loss", "val_loss") for t in ("tokens", "")}
            yield dict(model=e["model"], panel=e["panel"], label=e["label"] + f" ({run['status']})" * (run["status"] != "finished"), name=run["name"], **line)

def shapes(runs, args):
    # a line per model over d/L, at the best rate (DepthBench, Figure 2)
    es = [dict(e, x=e["n_embd"] / e["n_layer"], **e["rates"].get(e["best"], dict(mean=math.nan, std=0.0, n=0))) for e in experiments(runs) if e["n_layer"]]
    for label in dict.fromkeys(e["label"] for e in es):
        line = [e for e in es if e["label"] == label]
        columns = {name: [e[k] for e in line] for name, k in dict(x="x", loss="mean", loss_error="std", n="n", rate="best", n_layer="n_layer", n_embd="n_embd").items()}
        yield dict(label=label, model=line[0]["model"], lost=[e["x"] for e in line if e["rates"] and not e["n"]], **columns)

def lr(runs, args):
    # LR sensitivity (LayerRoPE, Table 9): the mean over rates of min(L(rate), ln V) - min L, a diverged run counting as ln V; over the
    # rates that all sweeps of one shape share, and over the sweep's own. Stable: at most one nat above the best
    es, keys, out = experiments(runs), ("label", "n_layer", "n_embd", "best"), []
    for e in es:
        sweeps, rates, cap = [set(f["rates"]) for f in es if f["panel"] == e["panel"] and len(f["rates"]) > 1], e["rates"], math.log(e["runs"][0]["vocab_size"])
        least, shared = rates[e["best"]]["mean"] if e["best"] else math.nan, set.intersection(*sweeps) if sweeps else set()
        capped = {lr: np.mean([min(run["val_loss"], cap) if run["status"] == "finished" else cap for run in r["runs"]]) for lr, r in rates.items()}
        mean = lambda over: float(np.mean([capped[r] - least for r in over])) if over else math.nan
        out.append(dict({k: e[k] for k in (*keys, "model", "panel")}, x=list(rates), loss=[r["mean"] for r in rates.values()], loss_error=[r["std"] for r in rates.values()],
                        lost=[lr for lr, r in rates.items() if not math.isfinite(r["mean"])], least=least, uniform=cap, shared=sorted(shared),
                        stable=max((lr for lr, r in rates.items() if r["mean"] <= least + 1), default=None), sensitivity=mean(shared & rates.keys()), sensitivity_own=mean(rates)))
    markdown("model, L, d, best rate, loss, largest stable rate, LR sensitivity, over rates, over its own rates", [[*(s[k] for k in keys),
             f"{s['least']:.4f}", s["stable"], f"{s['sensitivity']:.4f}", " ".join(f"{r:g}" for r in s["shared"]), f"{s['sensitivity_own']:.4f}"] for s in out])
    return out

# -----------------------------------------------------------------------------
# Depth, family by family: what it means to skip, to swap and to read out

def next_mix(model, l): # AttnRes: the mix that reads what l blocks have left
    return model.h[l].res_attn if l < len(model.h) else model.res_f

def newest(state): # its softmax, all on the newest source
    return torch.stack([torch.full_like(square, float(square is state[-1][1])) for _, square in state]) # (S, B, T)

def two_zero_slots(model, state): # MoDA: the keys and values of a skipped block are zero, and still take softmax weight
    (x, slots), c = state, model.config
    zero = x.new_zeros(len(x), c.n_kv_head, x.size(1), c.n_embd // c.n_head) # (B, Hkv, T, D)
    return x, slots + ((zero, zero),) * 2

PLAIN = dict(skip=lambda model, l: {model.h[l]: lambda state: state}, # {module: its forward} where block l is skipped
             swap=lambda model, i, j: [(model.h[i], model.h[j], "nothing")], # pairs to exchange, and the start of the names that stay
             lens=lambda model, state, l: model.hidden(state, l)) # what final norm and head read after l blocks
FAMILY = { # by a module of the block: where it is not PLAIN
    "kv_mlp": dict(PLAIN, skip=lambda model, l: {model.h[l]: lambda state: two_zero_slots(model, state)}),
    "res_mlp": dict(skip=lambda model, l: {model.h[l]: lambda state: state, next_mix(model, l + 1): newest}, # the mix that follows goes with the block
                    swap=lambda model, i, j: [(model.h[i], model.h[j], "res_attn."), (next_mix(model, i + 1), next_mix(model, j + 1), "nothing")],
                    lens=lambda model, state, l: sys.modules[type(model).__module__].mix(state, next_mix(model, l))),
    "hc_mlp": dict(PLAIN, lens=lambda model, state, l: model.readout(state)),
    "mhc_mlp": dict(PLAIN, lens=lambda model, state, l: model.readout(state))}

def family(model):
    return next((rules for name, rules in FAMILY.items() if hasattr(model.h[0], name)), PLAIN)

def swap(model, i, j):
    # exchanges every tensor and buffer that blocks i and j have under one name with one shape; twice is the identity
    for a, b, stay in family(model)["swap"](model, i, j):
        a, b = ({k: v for k, v in (*m.named_parameters(), *m.named_buffers()) if not k.startswith(stay)} for m in (a, b))
        for name in a.keys() & b.keys():
            if a[name].shape == b[name].shape:
                a[name].data, b[name].data = b[name].data, a[name].data

@contextlib.contextmanager
def replaced(forwards):
    # {module: another forward}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward

# -----------------------------------------------------------------------------
# Measures: (model, batches of x, y (B, T), args) -> {name: numbers}

class Unfit(Exception):
    """The measure has no meaning for this kind of checkpoint."""

def states(model, state, start=0):
    # (l, state after l blocks), l = start .. L, from token ids or from the state after `start` blocks
    state = model.begin(model.embed(state)) if torch.is_tensor(state) and state.dtype == torch.int64 else state
    yield start, state
    for l in range(start, len(model.h)):
        state = model.h[l](state)
        yield l + 1, state

def losses(model, states, y):
    # mean loss of each window (B) at the last of the states, the logits of one window at a time
    x = model.readout(list(states)[-1][1]) # (B, T, C)
    return torch.stack([model.head(x[b:b + 1], y[b:b + 1])[1] for b in range(len(y))])

def over(rows, batches):
    # rows(x, y) of every batch, (windows, ...): one row per window
    return torch.cat([rows(x, y).double().cpu() for x, y in batches])

def returned(model, x, names=r"(?<!norm)_(attn|mlp|f)$"):
    # {module: what it returned in one pass}, in order; by default the coefficients of the routing modules <thing>_attn, <thing>_mlp, <thing>_f
    found, modules = {}, [m for name, m in model.named_modules() if re.search(names, name)]
    hooks = [m.register_forward_hook(lambda m, args, out: found.update({m: out})) for m in modules]
    model.trunk(x)
    for hook in hooks:
        hook.remove()
    return found

def linear(model, x, norm, branch):
    # the coefficients of a pass over x held, and norm(k, h) and branch(k, *inputs) in the place of those of sub-layer k
    found = returned(model, x)
    forwards = {m: lambda *args, out=out: out for m, out in found.items()}
    for k, (block, part) in enumerate(itertools.product(model.h, ("attn", "mlp"))):
        if not hasattr(block, f"norm_{part}") or not set(block.children()) - found.keys() <= {block.norm_attn, block.attn, block.norm_mlp, block.mlp}:
            raise Unfit("what its sub-layers write is normed or scaled")
        forwards |= {getattr(block, f"norm_{part}"): lambda h, k=k: norm(k, h), getattr(block, part): lambda *inputs, k=k: branch(k, *inputs)}
    return replaced(forwards)

def unit(model, n, x): # (B, T, n, n), a unit vector for each of n
    return torch.eye(n, dtype=model.lm_head.weight.dtype, device=x.device).expand(*x.shape, -1, -1)

def angular(model, batches, args):
    # d(z_l, z_{l+n}) = arccos(cos) / pi, mean over tokens (DepthBench, Eq. 2)
    def rows(x, y):
        z = [model.hidden(state, l) for l, state in states(model, x)]
        u = (F.normalize(torch.stack([v[b] for v in z], dim=1).double(), dim=-1) for b in range(len(x))) # (T, L+1, C) each
        return torch.stack([(u @ u.mT).clamp(-1, 1).acos().mean(0) / math.pi for u in u]) # (B, L+1, L+1)
    d = over(rows, batches).mean(0)
    far = [[d[l, l + n].item() if l + n < len(d) else math.nan for l in range(len(d) - 1)] for n in range(1, len(d))]
    return dict(distance=far, profile=np.nanmean(far, axis=1))

def late(scores, threshold):
    # scores (L, L) of pairs s < l; of those with s >= L/4 the part above the threshold, and above every other (Eq. 5 to 8)
    L, grid = len(scores), torch.linspace(0, 1, 101)
    pairs = torch.stack([scores[s, l] for s in range(-(-L // 4), L) for l in range(s + 1, L)] or [scores.new_tensor(math.nan)])
    return dict(scores=scores.masked_fill(torch.ones(L, L).tril().bool(), math.nan), threshold=threshold, fraction=(pairs > threshold).double().mean(),
                thresholds=grid, fractions=(pairs > grid.unsqueeze(1)).double().mean(1))

def causal(model, batches, args):
    # C(s, l) = ||change of u_l where block s is skipped|| / ||u_l||, mean over tokens (Eq. 3)
    def rows(x, y):
        z, out = [model.hidden(state, l) for l, state in states(model, x)], torch.zeros(len(x), len(model.h), len(model.h))
        for s, clean in itertools.islice(states(model, x), len(model.h)): # run once more rather than kept
            with replaced(family(model)["skip"](model, s)):
                for l, state in states(model, clean, s):
                    after = model.hidden(state, l)
                    if l > s + 1: # the update of block l - 1
                        u = z[l] - z[l - 1] # (B, T, C)
                        out[:, s, l - 1] = ((after - before - u).norm(dim=-1) / u.norm(dim=-1).clamp(min=1e-8)).mean(1)
                    before = after
        return out
    return late(over(rows, batches).mean(0), args.thresholds[0])

def permutation(model, batches, args):
    # P(i, j) = |loss with blocks i and j exchanged - loss| / loss (Eq. 4); the blocks below i run once
    def rows(x, y):
        out = torch.zeros(len(x), len(model.h) + 1, len(model.h))
        for i, state in states(model, x):
            for j in range(i + 1, len(model.h)):
                swap(model, i, j)
                out[:, i, j] = losses(model, states(model, state, i), y)
                swap(model, i, j)
        out[:, -1, 0] = losses(model, [(i, state)], y)
        return out
    *loss, (clean, *_) = over(rows, batches).mean(0)
    return dict(loss=clean, **late((torch.stack(loss) - clean).abs() / clean, args.thresholds[1]))

def prune(model, batches, args):
    # what loss and perplexity gain where block l is skipped; with --task the accuracy too (Figure 8)
    skip = lambda l: replaced(family(model)["skip"](model, l) if l < len(model.h) else {})
    def rows(x, y):
        out = []
        for l, state in states(model, x):
            with skip(l):
                out.append(losses(model, states(model, state, l), y))
        return torch.stack(out, dim=1) # (B, L+1), the last with all blocks
    *loss, clean = over(rows, batches).mean(0)
    result = dict(loss=clean, loss_change=[v - clean for v in loss], perplexity_change=[v.exp() - clean.exp() for v in loss])
    if args.task:
        from evaluate import get_tokenizer, read_task, score # they need tiktoken
        examples, result["accuracy"] = read_task(args.task), []
        if len(examples[0]) != 3:
            fail(f"--task: {args.task} is not multiple choice")
        for l in range(len(model.h) + 1):
            with skip(l):
                result["accuracy"].append(score(model, get_tokenizer(args.tokenizer), examples, args.batch)["acc"])
        result["accuracy_change"] = [v - result["accuracy"][-1] for v in result["accuracy"][:-1]]
    return result

def lens(model, batches, args):
    # KL(final prediction || prediction from the state after l blocks) in nats per token
    logp = lambda h: model.head(h.unsqueeze(0))[0].log_softmax(-1) # (1, T, V), of one window
    def rows(x, y):
        windows = list(zip(*(family(model)["lens"](model, state, l) for l, state in states(model, x)))) # B of L+1 of (T, C)
        finals = map(logp, (w[-1] for w in windows))
        return torch.stack([torch.stack([F.kl_div(logp(h), final, log_target=True, reduction="sum") / x.size(1) for h in w]) for w, final in zip(windows, finals)])
    return dict(kl=over(rows, batches).mean(0))

def paths(model, batches, args):
    # w_{i->k}: how much of source i (0: embedding, i: output of sub-layer i - 1) is in the pre-norm input of sub-layer k (last: of the head), mean
    # over tokens. With the coefficients of a true pass held, the inputs are linear in the outputs: unit vectors in, weights out (Figure 7)
    K = 2 * len(model.h)
    def rows(x, y):
        reads, one = {}, unit(model, K + 1, x)
        def branch(k, *inputs):
            if k not in reads or len(inputs) > 1:
                raise Unfit("its stream is normed, or its sub-layers read more than the stream")
            return one[..., k + 1, :] # (B, T, K+1)
        with linear(model, x, reads.setdefault, branch):
            reads[K] = model.readout(list(states(model, model.begin(one[..., 0, :])))[-1][1])
        return torch.stack([reads[k].mean(1) for k in range(K + 1)], dim=1) # (B, K+1, K+1)
    return dict(weights=over(rows, batches).mean(0).masked_fill(torch.ones(K + 1, K + 1).triu(1).bool(), math.nan))

def products(model, x):
    # (B, T, L+1, N, N): the product of all residual maps up to block l; row j: what of each stream of the start is in stream j now
    n = model.hidden(next(states(model, x))[1], 0).size(-1) // model.config.n_embd
    if n < 2:
        raise Unfit("it has no residual maps between streams; hc and mhc have")
    with linear(model, x, lambda k, h: h, lambda k, h: torch.zeros_like(h)): # stream i starts as unit vector i
        return torch.stack([model.hidden(state, l).unflatten(-1, (n, n)) for l, state in states(model, (unit(model, n, x),))], dim=2)

def transport(model, batches, args):
    # of these products: effective rank, how parallel the ways of the streams (columns) are, singular values (Figure 10)
    def rows(x, y):
        P = products(model, x).double()
        s, u, n = torch.linalg.svdvals(P), F.normalize(P, dim=-2), P.size(-1) # (B, T, L+1, N), (B, T, L+1, N, N)
        p, cos = s / s.sum(-1, keepdim=True), ((u.mT @ u).abs().sum((-1, -2)) - n) / (n * (n - 1)) # (B, T, L+1, N), (B, T, L+1)
        return torch.cat(((-torch.xlogy(p, p).sum(-1)).exp(), cos, s[:, :, -1] / s[:, :, -1, :1]), dim=-1).mean(1) # (B, 2(L+1) + N)
    values, rng, L = over(rows, batches).numpy(), np.random.default_rng(args.seed), len(model.h)
    draws = [values[rng.integers(len(values), size=len(values))].mean(0) for _ in range(1000)]
    error = np.abs(np.quantile(draws, (0.025, 0.975), axis=0) - values.mean(0)) # to the ends of the bootstrap interval over windows, 95 %
    names = "effective_rank", "cosine", "singular_values", "effective_rank_error", "cosine_error", "singular_values_error"
    return dict(zip(names, (part for v in (values.mean(0), error) for part in np.split(v, (L + 1, 2 * L + 2), axis=-1))))

def block_mix(model, batches, args):
    # Block AttnRes: the weight on the running sum at reader k = 1 .. 2L, null where its newest source is complete (Figure 9)
    def rows(x, y):
        p = [out for out in returned(model, x).values() if torch.is_tensor(out)] # (S, B, T) for each reader
        sizes = [len(v) for v in p]
        if len(set(sizes)) == len(sizes):
            raise Unfit("it has no running sum; attnres_block has")
        running = [a == b for a, b in zip(sizes, sizes[1:])] + [True] # the output that followed joined the newest source
        return torch.stack([v[-1].mean(-1) * (1 if r else math.nan) for v, r in zip(p, running)], dim=1) # (B, 2L)
    return dict(running_sum=over(rows, batches).mean(0))

def gates(model, batches, args):
    # MGR: the write gates beta of the sub-layers that have them: distribution in 100 bins, mean by stream, largest; over tokens
    largest = {}
    def rows(x, y):
        betas = [out[1].cpu() for out in returned(model, x).values() if isinstance(out, tuple) and len(out) == 2 and out[1].dim() == 3] # (B, T, N)
        if not betas:
            raise Unfit("it has no write gates; mgr has")
        largest.update({k: max(b.max(), largest.get(k, b.max())) for k, b in enumerate(betas)})
        return torch.stack([torch.cat((torch.stack([w.float().histc(100, 0, 1) for w in b]) / b[0].numel(), b.mean(1)), dim=-1) for b in betas], dim=1)
    out = over(rows, batches).mean(0) # (gating sub-layers, 100 + N)
    return dict(distribution=out[:, :100].T, below_tenth=out[:, :10].sum(1), mean={f"stream {i}": v for i, v in enumerate(out[:, 100:].T)}, largest=list(largest.values()))

def activations(model, batches, args):
    # variance of z_l over features and tokens but the first; its norm; the three largest absolute entries of it and of what attention and MLP return
    top = {}
    def rows(x, y):
        z = [model.hidden(state, l).double() for l, state in states(model, x)]
        for part, vs in dict(hidden=z, **{k: returned(model, x, rf"h\.\d+\.{k}$").values() for k in ("attn", "mlp")}).items():
            for l, v in enumerate(vs):
                v = (v[0] if isinstance(v, tuple) else v).abs().flatten().topk(3).values
                top[part, l] = torch.cat((top.get((part, l), v[:0]), v)).topk(3).values
        return torch.stack([torch.stack((v[:, 1:].mean((1, 2)), v[:, 1:].square().mean((1, 2)), v.norm(dim=-1).mean(1)), dim=-1) for v in z], dim=1) # (B, L+1, 3)
    mean, square, norm = over(rows, batches).mean(0).T
    return dict(variance=square - mean**2, norm=norm) | {part: {f"top {i + 1}": [v[i] for (p, _), v in top.items() if p == part] for i in range(3)} for part, _ in top}

def grads(model, batches, args):
    # norm of the gradient of the mean loss, block by block
    model.zero_grad()
    with torch.enable_grad():
        count = sum(model(x[b:b + 1], y[b:b + 1])[1].backward() or 1 for x, y in batches for b in range(len(x)))
    norm = lambda part: sum(p.grad.double().square().sum().item() for p in part.parameters() if p.grad is not None) ** 0.5 / count
    return dict(gradient={name: [norm(part(b)) for b in model.h] for name, part in dict(block=lambda b: b, attn=lambda b: b.attn, mlp=lambda b: b.mlp).items()})

def schedule(model, batches, args):
    # LayerRoPE: exp(r(l)) and theta(l) of the fastest pair in degrees, at each site, and the slopes (Figures 19, 20)
    if not hasattr(model, "depth"):
        raise Unfit("it has no depth schedule; layerrope has")
    ln, sites = torch.arange(1, len(model.h) + 1).log(), model.depth.items()
    return dict(multiplier={k: (float(s.alpha) + float(s.beta) * ln).exp() for k, s in sites}, slope={k: float(s.beta) for k, s in sites},
                rotation={k: (float(s.alpha_rot) + float(s.beta_rot) * ln).exp().rad2deg() for k, s in sites}, rotation_slope={k: float(s.beta_rot) for k, s in sites})

def norms(tensors, batches, args):
    # {name: tensor} -> of the norm gains, layer by layer: magnitude, and angle in the plane of a classical MDS of their vectors (LayerRoPE, Figure 2)
    sites, out = {}, dict(mean={}, q95={}, norm={}, angle={}, arc={}, explained={})
    for name in filter(re.compile(args.pattern).search, tensors):
        sites.setdefault(re.sub(r"\d+", "*", name, count=1), {})[int(re.search(r"\d+", name)[0])] = tensors[name].double()
    if not sites:
        raise Unfit(f"no tensor has a name like {args.pattern}; layerrope's gains are in schedule")
    for site, gains in sites.items():
        layers, X = sorted(gains), torch.stack([gains[l] for l in sorted(gains)]) # (layers, C)
        u, s, _ = torch.linalg.svd(X - X.mean(0), full_matrices=False)
        at = F.pad(u * s, (0, 1)).numpy() # (layers, 2 or more)
        angle = np.degrees(np.unwrap(np.arctan2(at[:, 1], at[:, 0])))
        line = lambda v: [dict(zip(layers, v)).get(l, math.nan) for l in range(layers[-1] + 1)] # a layer without this norm: nan
        values = line(X.mean(1)), line(X.quantile(0.95, dim=1)), line(X.norm(dim=1)), line(angle - angle[0]), np.ptp(angle), s[:2].square().sum() / s.square().sum()
        for key, value in zip(out, values):
            out[key][site] = value
    return out

def read_tensors(path, pattern):
    # {name: tensor} of a .safetensors file (8 bytes: length of the JSON header), or of a .pt state dict
    if path.suffix != ".safetensors":
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        return tensors.get("model", tensors)
    raw = np.memmap(path, mode="r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    kinds = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
    read = lambda v: torch.frombuffer(bytearray(raw[start + v["data_offsets"][0]:start + v["data_offsets"][1]]), dtype=kinds[v["dtype"]]).view(v["shape"])
    return {name: read(v) for name, v in json.loads(raw[8:start].tobytes()).items() if re.search(pattern, name)}

def cost(model, batches, args):
    # a prefill of --batch sequences of --seq_len tokens, logits at the last position: FLOPs and KV cache of one sequence, memory and time of all
    c, T, device = model.config, min(args.seq_len, model.config.block_size), model.lm_head.weight.device
    idx = torch.zeros(args.batch, T, dtype=torch.int64, device=device)
    def prefill():
        start = time.perf_counter()
        model.head(model.trunk(idx)[:, -1:])[0].sum().item() # waits for the device
        return time.perf_counter() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile: # this pass also warms up
        prefill()
    events = sorted((e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else max(itertools.accumulate(n for _, n in events)) + 4 * model.num_params()
    values = dict(ratio=c.n_embd / c.n_layer, flops=model.flops(T) - 2 * (T - 1) * c.n_embd * c.vocab_size,
                  kv_bytes=8 * c.n_layer * c.n_kv_head * (c.n_embd // c.n_head) * T, peak_bytes=peak, seconds=sorted(prefill() for _ in range(5))[2])
    return {k: [v] for k, v in values.items()}

# -----------------------------------------------------------------------------
# Output

LOSS, LATE = "loss (nats per token)", ("line", "fractions", "pairs of the last 3/4 above a threshold", "threshold", "fraction", "thresholds")
MEASURES = { # name: (function, windows by default, *panels); a panel: (kind, key, title, x label, y label, first x or the key of x)
    "table": (table, None),
    "curves": (curves, None, ("line", "loss", "training", "tokens", LOSS, "losstokens"), ("line", "val_loss", "validation", "tokens", LOSS, "val_losstokens")),
    "shapes": (shapes, None, ("line logx flip", "loss", "at the best rate; bars: seeds; x: diverged", "d / L, from wide to deep", LOSS, "x")),
    "lr": (lr, None, ("line logx", "loss", "x: diverged", "peak learning rate", LOSS, "x")),
    "angular": (angular, 1024, ("map", "distance", "angular distance", "from z_l", "to z_(l+n+1), n", 0), ("line", "profile", "mean over l", "n blocks on", "angular distance", 1)),
    "causal": (causal, 128, ("map", "scores", "causal score", "block l", "skipped block s", 0), LATE),
    "permutation": (permutation, 128, ("map", "scores", "permutation score", "block j", "exchanged with block i", 0), LATE),
    "prune": (prune, 128, ("line", "loss_change", "one block skipped", "block", f"gain in {LOSS}", 0), ("line logy", "perplexity_change", "one block skipped", "block", "gain in perplexity", 0),
              ("line", "accuracy_change", "one block skipped", "block", "change of accuracy", 0)),
    "lens": (lens, 128, ("line", "kl", "prediction after l blocks", "l", "KL to the final one (nats per token)", 0)),
    "paths": (paths, 512, ("map", "weights", "path weights", "source (0: embedding)", "reading sub-layer", 0)),
    "transport": (transport, 512, ("line", "effective_rank", "product of the residual maps", "blocks", "effective rank", 0), ("line", "cosine", "streams of the start", "blocks", "mean |cosine|", 0),
                  ("line logy", "singular_values", "product over all blocks", "index", "singular value / largest", 1)),
    "block_mix": (block_mix, 512, ("line", "running_sum", "weight on the running sum", "reading sub-layer", "weight", 1)),
    "gates": (gates, 512, ("map", "distribution", "write gates", "gating sub-layer", "beta, in hundredths", 0), ("line", "mean", "mean gate", "gating sub-layer", "beta", 0)),
    "variance": (activations, 512, ("line logy", "variance", "without position 0", "after l blocks", "variance", 0), ("line logy", "norm", "", "after l blocks", "norm of z_l", 0)),
    "massive": (activations, 512, *(("line logy", k, f"three largest entries, {k}", "after l blocks", "absolute value", int(k != "hidden")) for k in ("hidden", "attn", "mlp"))),
    "grads": (grads, 128, ("line logy", "gradient", "gradient of the mean loss", "block", "norm", 0)),
    "schedule": (schedule, 0, ("line logy", "multiplier", "learned multiplier", "block", "e^r", 0), ("line", "rotation", "rotation of the fastest pair", "block", "degrees", 0)),
    "norms": (norms, 0, ("line", "mean", "mean of the gains", "block", "gain", 0), ("line", "q95", "their 95 % quantile", "block", "gain", 0), ("line", "angle", "angle in the MDS plane", "block", "degrees", 0)),
    "cost": (cost, 0, *(("line logx flip", k, "prefill", "d / L, from wide to deep", k.replace("_", " "), "ratio") for k in ("flops", "kv_bytes", "peak_bytes", "seconds")))}

def as_json(x): # tensors, arrays and paths too; null for nan and inf, so that any program reads it
    text = json.dumps(x, indent=1, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
    return re.sub(r"^( *(?:\".*\": )?)(?:NaN|-?Infinity)(?=,?$)", r"\1null", text, flags=re.M) + "\n"

def draw(panels, runs):
    # a map for each run, or the lines of all runs of one panel
    import matplotlib
    matplotlib.use("Agg") # no display needed
    import matplotlib.pyplot as plt
    groups = [[r for r in runs if r.get("panel") == name] for name in dict.fromkeys(r.get("panel") for r in runs)]
    cells = [(panel, rs) for panel in panels if panel[1] in runs[0] for rs in ([[r] for r in runs] if panel[0] == "map" else groups)]
    columns = min(len(groups) if len(groups) > 1 else len(cells), 4)
    rows = -(-len(cells) // columns)
    fig, axes = plt.subplots(rows, columns, figsize=(max(4.6 * columns, 7), 3.6 * rows), squeeze=False, layout="constrained")
    for ax in axes.flat[len(cells):]:
        ax.remove()
    for ax, ((kind, key, title, xlabel, ylabel, first), rs) in zip(axes.flat, cells):
        ax.set(xlabel=xlabel, ylabel=ylabel, title=": ".join(filter(None, (rs[0]["label"] if kind == "map" else rs[0].get("panel"), title))))
        if kind == "map":
            every = np.concatenate([np.ravel(np.array(r[key], float)) for r in runs] + [[0, 1e-9]]) # one scale for all, its end at the 99 % quantile
            fig.colorbar(ax.imshow(np.array(rs[0][key], float), origin="lower", aspect="auto", vmin=np.nanmin(every), vmax=np.nanquantile(every, 0.99)), ax=ax, extend="max")
            continue
        for r in rs:
            color, error = COLORS.get(r["model"], "lime"), np.array(r[f"{key}_error"], float) if f"{key}_error" in r else None
            ax.plot(r.get("lost", []), [0.97] * len(r.get("lost", [])), "x", color=color, transform=ax.get_xaxis_transform())
            for i, (name, v) in enumerate(r[key].items() if isinstance(r[key], dict) else [("", r[key])]):
                ax.errorbar(range(first, first + len(v)) if isinstance(first, int) else r[first], np.array(v, float), error, color=color,
                            ls=("-", "--", ":", "-.")[i % 4], lw=1, marker=".", ms=4, capsize=2, label=f"{r['label']} {name}".strip())
        ax.set(**{f"{a}scale": "log" for a in "xy" if f"log{a}" in kind})
        if "logx" in kind:
            ticks = sorted({x for r in rs for x in r[first]}, reverse="flip" in kind)
            ax.set_xticks(ticks, [f"{x:.3g}" for x in ticks])
            ax.minorticks_off()
            ax.xaxis.set_inverted("flip" in kind)
    handles = {label: h for ax in fig.axes for h, label in zip(*ax.get_legend_handles_labels())}
    if handles:
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return fig

def measured(name, path, args):
    # what one measure says of one checkpoint, None where it does not apply
    if name == "norms" and path.is_file():
        try:
            return dict(label=path.name, model="", **norms(read_tensors(path, args.pattern), [], args))
        except re.error:
            raise
        except Exception as e: # a damaged file fails in many ways
            fail(f"{path}: {e if isinstance(e, Unfit) else 'is neither a safetensors file nor a state dict'}")
    (model, ckpt), (function, windows, *_), batches = load_checkpoint(path), MEASURES[name], []
    config, T = ckpt["config"], min(args.seq_len, model.config.block_size)
    about = dict(name=path.name, label=f"{config['model']} L{model.config.n_layer} d{model.config.n_embd}", model=config["model"], seq_len=T)
    args.tokenizer = config.get("tokenizer", "gpt2")
    if windows:
        loader = Loader(args.data or config["data"], "val", T)
        order = np.random.default_rng(args.seed).permutation(len(loader))[:args.samples or windows].tolist()
        chunks = tqdm([order[i:i + args.batch] for i in range(0, len(order), args.batch)], desc=f"{name} {path.name}", disable=None)
        batches, about["samples"] = (tuple(t.to(args.device) for t in loader.batch(chunk)) for chunk in chunks), len(order)
    try:
        return dict(about, **function(model.state_dict() if name == "norms" else model.to(args.device), batches, args))
    except Unfit as e:
        if args.measure != "all":
            print(f"error: {name}: {path.name} ({config['model']}): {e}", file=sys.stderr)

@torch.no_grad()
def main(argv=None):
    parser = argparse.ArgumentParser(prog="analyze.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: fail(message, 2)
    parser.add_argument("measure", choices=[*MEASURES, "all"])
    parser.add_argument("paths", nargs="+", type=Path, help="run directories, or checkpoints")
    parser.add_argument("--out_dir", default="out/analysis", type=Path, help="where JSON and PNG go")
    parser.add_argument("--csv", help="table: every run, one line each, into this file")
    parser.add_argument("--data", help="directory of shards, by default the one that each checkpoint was trained on; the validation split is read")
    parser.add_argument("--samples", type=int, default=0, help="windows; 0: as many as the papers take")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens of a window, at most the model's block_size")
    parser.add_argument("--seed", type=int, default=0, help="which windows, and the bootstrap")
    parser.add_argument("--batch", type=int, default=8, help="windows at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"][:1 + torch.cuda.is_available()])
    parser.add_argument("--thresholds", type=float, nargs=2, default=[0.45, 0.15], metavar=("CAUSAL", "PERMUTATION"), help="of the late-pair fractions")
    parser.add_argument("--task", help="prune: a multiple-choice task of evaluate.py, or a JSONL file of {prompt, choices, answer}")
    parser.add_argument("--pattern", default=r"h\.\d+\.norm_\w+\.weight", help="norms: names of the gains, the first number being the layer")
    args = parser.parse_args(argv)
    if min(args.seq_len, args.batch, args.samples + 1) < 1:
        fail(f"--seq_len, --batch, --samples: {args.seq_len}, {args.batch}, {args.samples} must be positive")
    status, settings = 0, {k: v for k, v in vars(args).items() if k not in ("measure", "paths", "out_dir", "csv")}
    for name in [args.measure] if args.measure != "all" else [n for n, (_, windows, *_) in MEASURES.items() if windows is not None]:
        function, windows, *panels = MEASURES[name]
        try:
            runs = list(function(list(map(read_run, args.paths)), args) or []) if windows is None else [r for r in (measured(name, p, args) for p in args.paths) if r]
            status |= windows is not None and len(runs) < len(args.paths) and args.measure != "all"
            if runs: # JSON first: the numbers survive whatever happens to the figure
                args.out_dir.mkdir(parents=True, exist_ok=True)
                text = as_json(dict(measure=name, settings=settings, runs=runs))
                (args.out_dir / f"{name}.json").write_text(text, encoding="utf-8")
                draw(panels, json.loads(text)["runs"]).savefig(args.out_dir / f"{name}.png", dpi=130)
                print(args.out_dir / f"{name}.png")
        except OSError as e:
            fail(f"{e.filename}: {e.strerror}")
        except re.error as e:
            fail(f"--pattern: {e}")
    return int(status)

if __name__ == "__main__":
    sys.exit(main())
