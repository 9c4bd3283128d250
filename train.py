"""
Train any model_*.py beside this file, on one process or many, on CPU or CUDA.

    python train.py --preset nano                                   # two minutes on two CPU cores, embedded data
    python train.py --model hc --n_layer 24 --n_embd 1024           # one GPU, DepthBench's recipe
    torchrun --nproc_per_node 8 train.py --model hc --n_layer 70 --n_embd 640

Writes out/<run_name>/: config.json, log.jsonl, ckpt.pt, and at the end result.json.
Exit status: 0 finished, 1 error, 2 a flag that cannot be parsed, 3 diverged, 130 or 143 interrupted and saved.
"""
import ast
import contextlib
import ctypes
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import io
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

try:
    import fcntl
    import resource
except ImportError: # of Unix only
    fcntl = resource = None

HERE = Path(__file__).resolve().parent

@dataclasses.dataclass
class TrainConfig:
    # run
    model: str = "preln" # architecture, one of the names at the end of this help
    preset: str = "" # nano: embedded data and a small model, two minutes on two CPU cores
    out_dir: str = "out" # directory of the run directories
    run_name: str = "" # run directory, empty: {model}-L{n_layer}-d{n_embd}-lr{learning_rate}-s{seed}
    resume: bool = False # continue the run of this name: the same command plus --resume
    seed: int = 0 # of the weights and of the data order
    dry_run: str = "" # print sizes as JSON and stop; --dry_run -: one line of flags per line of stdin
    # data
    data: str = "data/fineweb_edu" # directory of token shards
    # optimisation
    optimizer: str = "adamw" # adamw, or muon: Muon on the hidden matrices, AdamW on the rest
    learning_rate: float = 2e-3 # peak; the default is the architecture's own
    min_lr_frac: float = 0.1 # final learning rate as a fraction of the peak
    weight_decay: float = 0.1 # decoupled
    beta1: float = 0.9 # Adam's first moment
    beta2: float = 0.95 # Adam's second moment
    eps: float = 1e-8 # Adam's denominator
    grad_clip: float = 1.0 # global gradient norm, 0: off
    muon_lr: float = 0.02 # peak of Muon's own learning rate
    # schedule: one of tokens_per_param, tokens, steps
    tokens_per_param: float = 20.0 # training tokens per parameter of Pre-LN at this shape
    tokens: int = 0 # training tokens, 0: by tokens_per_param
    steps: int = -1 # optimizer steps, -1: by tokens
    warmup_frac: float = 0.1 # part of the steps with rising learning rate
    # batch
    batch_tokens: int = 1048576 # tokens per optimizer step, over all processes
    micro_batch: int = 8 # sequences per process per pass, lowered to a divisor unless given
    # evaluation and log
    eval_every: int = 500 # steps between validations, 0: at the end only
    eval_tokens: int = 10485760 # validation tokens, the same ones each time
    log_every: int = 10 # steps between log lines
    save_every: int = 500 # steps between checkpoints, 0: at the end only
    layer_stats_every: int = 0 # steps between per-layer norms, variances and gradient norms, 0: never
    wandb: bool = False # log to Weights & Biases too
    # system
    device: str = "auto" # cpu, cuda; auto: cuda where there is one
    dtype: str = "auto" # float32 or bfloat16 (autocast, FP32 weights); auto: bfloat16 on cuda
    compile: bool = None # torch.compile the blocks; default: on for cuda
    fused: str = "auto" # on, off, auto: kernels.py where it is known to gain
    ddp_backend: str = "auto" # nccl, gloo; auto: by device

PRESETS = {"nano": dict(data="data/stdlib", vocab_size=320, block_size=256, n_layer=4, n_head=4, n_embd=64, steps=750, batch_tokens=2048,
                        eval_every=75, eval_tokens=65536, save_every=150, log_every=20)}
# what may differ between two commands for the same run
NOT_THE_RUN = {"preset", "out_dir", "run_name", "resume", "dry_run", "micro_batch", "eval_every", "log_every", "save_every", "layer_stats_every", "wandb",
               "device", "compile", "fused", "ddp_backend", "tokens_per_param", "tokens", "world_size", "versions", "commit", "command"}
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12} # dense BF16, for mfu

def fail(message, code=1):
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)

# -----------------------------------------------------------------------------
# Models: every model_*.py beside this file, known by its VARIANTS

@functools.cache
def find_models():
    # {command-line name: (path of the model file, its overrides)}; read with ast, so a broken file stops nobody else
    found = {}
    for path in sorted(HERE.glob("model_*.py")):
        try:
            body = ast.parse(path.read_text(encoding="utf-8")).body
            variants = dict(next(ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "VARIANTS"))
        except Exception as e:
            print(f"note: {path.name}: no VARIANTS could be read ({type(e).__name__}), left out", file=sys.stderr)
            continue
        for name, overrides in variants.items():
            if name in found:
                fail(f"--model: {name} is in {found[name][0].name} and in {path.name}; rename one of the two")
            found[name] = (path, overrides)
    return found

def load_module(path):
    # the module of one model file, imported once
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as e:
            del sys.modules[path.stem]
            fail(f"{path.name}: {type(e).__name__}: {e}")
    return sys.modules[path.stem]

def config_fields(name):
    # {field: dataclasses.Field} of the GPTConfig of a command-line name
    return load_module(find_models()[name][0]).GPTConfig.__dataclass_fields__

def build(name, **fields):
    # GPT of a command-line name; fields of its GPTConfig given here win over those in VARIANTS
    path, overrides = find_models()[name]
    module = load_module(path)
    own = {k: v for k, v in overrides.items() if k in config_fields(name)}
    return module.GPT(module.GPTConfig(**{**own, **fields}))

def build_run(config):
    # GPT of a run's config, whatever else that holds
    return build(config["model"], **{k: v for k, v in config.items() if k in config_fields(config["model"])})

def build_meta(config):
    # the same on the meta device: only shapes, no number is drawn, no table is computed
    skip = lambda tensor, *args, **kwargs: tensor
    no_table = mock.patch.object(load_module(find_models()[config["model"]][0]), "rotary_table", lambda T, D, base: (torch.empty(T, D // 2),) * 2, create=True)
    with torch.device("meta"), no_table, mock.patch.multiple("torch.nn.init", kaiming_uniform_=skip, normal_=skip, trunc_normal_=skip):
        return build_run(config)

# -----------------------------------------------------------------------------
# Flags: TrainConfig plus the fields of the chosen model's GPTConfig

def print_help(name, defaults):
    print(__doc__)
    for title, cls in (("", TrainConfig), (f"model {name}\n", load_module(find_models()[name][0]).GPTConfig)):
        print(title, end="")
        for group, field, comment in re.findall(r"^    (?:# (.*)|(\w+): \w+ = [^#\n]*# (.*))$", inspect.getsource(cls), re.M):
            print(group if group else f"  --{field:<20}{comment} [{defaults[field]}]")
    print("models\n  " + " ".join(find_models()))

def convert(name, text, kind):
    # the value of one flag; text is None where it was given without one; whole numbers may be written 1e3 or 4.0
    if text is None:
        text = "true" if kind is bool else "run" if name == "dry_run" else fail(f"--{name}: needs a value", 2)
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if kind is int and re.fullmatch(r"[+-]?\d{1,19}", text):
            return int(text)
        if kind is not str and (not math.isfinite(float(text)) or kind(float(text)) != float(text) or kind is int and abs(float(text)) >= 2**63):
            raise ValueError
        return text if kind is str else kind(float(text))
    except (ValueError, KeyError):
        fail(f"--{name}: {text!r} is not {dict(bool='true or false', int='a whole number', float='a finite number')[kind.__name__]}", 2)

def parse(argv):
    # flags as typed -> cfg (every TrainConfig and GPTConfig field, by name) and the set of names that were typed
    models, typed, wants_help = find_models(), {}, {"-h", "--help"}.intersection(argv)
    args = [a for a in argv if a not in wants_help]
    while args:
        flag, equals, text = args.pop(0).partition("=")
        if not flag.startswith("--"):
            fail(f"{flag}: not a flag; write --name value", 2)
        if not equals:
            text = args.pop(0) if args and not args[0].startswith("--") else None
        if flag.startswith("--no-") and text is None:
            flag, text = f"--{flag[5:]}", "false"
        if flag[2:] in typed:
            fail(f"{flag}: given twice", 2)
        typed[flag[2:]] = text
    name, preset = (convert(key, typed.get(key, getattr(TrainConfig, key)), str) for key in ("model", "preset"))
    for flag, value, known in (("model", name, models), ("preset", preset, ("", *PRESETS))):
        if value not in known:
            fail(f"--{flag}: {value} is not one of {', '.join(filter(None, known))}")
    fields = {**TrainConfig.__dataclass_fields__, **config_fields(name)}
    values = {**{k: f.default for k, f in fields.items()}, **models[name][1], **PRESETS.get(preset, {})}
    if wants_help:
        print_help(name, {**values, "model": name})
        raise SystemExit(0)
    for key in [k for k in typed if k not in fields]:
        near = difflib.get_close_matches(key.replace("-", "_"), fields, 1)
        owners = [m for m, (path, _) in models.items() if f"\n    {key}: " in path.read_text(encoding="utf-8")]
        hint = f"--model {name} has no such field, {', '.join(owners)} has" if owners else f"did you mean --{near[0]}?" if near else "see --help"
        fail(f"--{key}: unknown flag; {hint}", 2)
    lengths = [k for k in ("tokens_per_param", "tokens", "steps") if k in typed]
    if len(lengths) > 1:
        fail(f"--{lengths[1]}: excludes --{lengths[0]}; give one of the two", 2)
    values.update(dict(tokens=0, steps=-1) if lengths else {}) # the command line beats the preset
    return SimpleNamespace(**{**values, **{k: convert(k, text, fields[k].type) for k, text in typed.items()}}), set(typed)

def check(cfg):
    # ends the program on a value that no run could make sense of
    choices = dict(optimizer=("adamw", "muon"), device=("auto", "cpu", "cuda"), dtype=("auto", "float32", "bfloat16"), fused=("auto", "on", "off"),
                   ddp_backend=("auto", "nccl", "gloo"), dry_run=("", "run", "-"))
    for name, allowed in choices.items():
        if getattr(cfg, name) not in allowed:
            fail(f"--{name}: {getattr(cfg, name)} is not one of {', '.join(filter(None, allowed))}")
    ranges = [("is negative", lambda v: v >= 0, "learning_rate weight_decay grad_clip muon_lr tokens eval_every save_every layer_stats_every seed"),
              ("is not positive", lambda v: v > 0, "batch_tokens micro_batch eval_tokens log_every tokens_per_param eps"),
              ("is not between 0 and 1", lambda v: 0 <= v <= 1, "min_lr_frac warmup_frac"), ("is not in [0, 1)", lambda v: 0 <= v < 1, "beta1 beta2"),
              ("is negative", lambda v: v >= -1, "steps"), ("is not below 2**63", lambda v: v < 2**63, "seed"),
              ("is empty", bool, "out_dir"), ("is not the name of one directory", lambda v: Path(v).name == v != "..", "run_name"),
              ("is above 10,000", lambda v: v <= 10_000, "n_layer"), ("is above 1e9", lambda v: v <= 1e9, "tokens_per_param")]
    for wrong, right, names in ranges:
        for name in names.split():
            if not right(getattr(cfg, name)):
                fail(f"--{name}: {getattr(cfg, name)!r} {wrong}")
    if cfg.wandb and not cfg.dry_run and not importlib.util.find_spec("wandb"):
        fail("--wandb: the package wandb is not installed; pip install wandb")

def settle(cfg, given, world_size=1):
    # fills in what the flags leave open; returns the model on the meta device. Ends the program on a value that makes no sense
    check(cfg)
    found = torch.cuda.is_available()
    cfg.device = cfg.device if cfg.device != "auto" else "cuda" if found else "cpu"
    cuda = cfg.device == "cuda"
    cfg.dtype = cfg.dtype if cfg.dtype != "auto" else "bfloat16" if cuda else "float32"
    cfg.compile = cuda if cfg.compile is None else cfg.compile
    cfg.ddp_backend = cfg.ddp_backend if cfg.ddp_backend != "auto" else "nccl" if cuda else "gloo"
    if (cuda or cfg.ddp_backend == "nccl") and not (cfg.dry_run or found):
        fail(f"--{'device: cuda' if cuda else 'ddp_backend: nccl'} needs a CUDA device, and torch {torch.__version__} finds none")
    meta = read_meta(cfg.data)
    cfg.tokenizer = meta.get("tokenizer", "gpt2")
    if "vocab_size" not in given and meta:
        cfg.vocab_size = -(-meta["vocab_size"] // 64) * 64
    try:
        model = build_meta(vars(cfg))
    except ValueError as e:
        fail(f"--{e}")
    except (RuntimeError, TypeError) as e: # torch counts bytes in 63 bits
        if "overflow" not in str(e).lower():
            raise
        fail(f"--model {cfg.model}: a tensor of these sizes is too large to exist ({str(e).splitlines()[0]})")
    vars(cfg).update(vars(model.config))
    if cfg.batch_tokens % (cfg.block_size * world_size):
        fail(f"--batch_tokens: {cfg.batch_tokens} is not a multiple of block_size {cfg.block_size} x {world_size} process{'es' * (world_size > 1)}")
    per_rank = cfg.batch_tokens // cfg.block_size // world_size
    if "micro_batch" in given and per_rank % cfg.micro_batch:
        fail(f"--micro_batch: {cfg.micro_batch} does not divide the {per_rank} sequences that a process takes per step")
    cfg.micro_batch = next(m for m in range(min(cfg.micro_batch, per_rank), 0, -1) if per_rank % m == 0)
    if cfg.steps < 0:
        cfg.steps = max(1, round((cfg.tokens or cfg.tokens_per_param * preln_params(cfg)) / cfg.batch_tokens))
    cfg.tokens = cfg.steps * cfg.batch_tokens
    cfg.run_name = cfg.run_name or f"{cfg.model}-L{cfg.n_layer}-d{cfg.n_embd}-lr{cfg.learning_rate:g}-s{cfg.seed}"
    return model

def preln_params(c):
    d_kv = c.n_kv_head * c.n_embd // c.n_head
    return 2 * c.vocab_size * c.n_embd + c.n_layer * (2 * c.n_embd**2 + 2 * c.n_embd * d_kv + 3 * c.n_embd * c.d_ff + 2 * c.n_embd) + c.n_embd

def lr_at(step, cfg, peak):
    # linear warm-up over W steps, then cosine: above 0 at step 0, peak at W-1, exactly peak * min_lr_frac at the last step
    W = max(1, round(cfg.warmup_frac * cfg.steps))
    if step < W:
        return peak * (step + 1) / W
    low = peak * cfg.min_lr_frac
    return low + (peak - low) * (1 + math.cos(math.pi * (step - W + 1) / (cfg.steps - W))) / 2

# -----------------------------------------------------------------------------
# Data: shards of token ids, cut into windows of T+1 tokens with stride T

HEADERS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")} # (magic, version) -> ids

def read_meta(data):
    # meta.json of a data directory, {} where there is none
    path = Path(data) / "meta.json"
    meta = read_json(path)
    if os.path.exists(path) and not (isinstance(meta.get("vocab_size"), int) and isinstance(meta.get("tokenizer"), str) and isinstance(meta.get("tokens", {}), dict)):
        fail(f"{path}: is not the meta.json that prepare_fineweb.py writes; run it again")
    return meta

def open_shard(path):
    # (dtype, byte offset, tokens) of one shard: llm.c's header, or nanoGPT's bare uint16
    size = path.stat().st_size
    head = np.fromfile(path, "<i4", 256)
    if head.size == 256 and not head[3:].any() or head[:1].tolist() in [[magic] for magic, _ in HEADERS]:
        if head.size < 256 or tuple(head[:2].tolist()) not in HEADERS:
            fail(f"{path}: its header of {head.size} numbers begins {head[:2].tolist()}, not with a magic and version of {list(HEADERS)}")
        dtype, count = HEADERS[tuple(head[:2].tolist())], int(head[2])
        if size != 1024 + count * dtype.itemsize:
            fail(f"{path}: header says {count} tokens of {dtype.itemsize} bytes, the file holds {(size - 1024) / dtype.itemsize:.15g}; make it again")
        return dtype, 1024, count
    ids = np.fromfile(path, "<u2", 4096)
    if size % 2 or ids.size > 1 and ids[::2].any() and not ids[1::2].any():
        fail(f"{path}: {size} bytes without a header are not 2-byte token ids")
    return np.dtype("<u2"), 0, size // 2

def stamp(path):
    # what changes with the bytes of a file
    return path.stat().st_size, path.stat().st_mtime_ns

class Loader:
    """Windows of one split ("train" or "val") of a data directory. Which windows a step sees depends on (seed, step) alone."""

    def __init__(self, data, split, block_size, seed=0):
        self.T, self.seed, self.epoch, meta = block_size, seed, -1, read_meta(data)
        if meta and meta.get("complete") is not True:
            fail(f"{data}: meta.json does not say complete; run prepare_fineweb.py again, it continues")
        paths = sorted(Path(data).glob(f"*{split}*.bin"))
        if not paths:
            source = "stdlib" if Path(data).name == "stdlib" else "fineweb_edu"
            command = f"python prepare_fineweb.py --source {source} --out_dir {shlex.quote(str(data))}"
            fail(f"--data: no {split} shards in {Path(data).absolute()}; prepare them: {command}")
        self.shards, self.stamps = [(path, *open_shard(path)) for path in paths], {path: stamp(path) for path in paths}
        found = {path.name: n for path, _, _, n in self.shards}
        listed = {name: n for name, n in meta.get("tokens", found).items() if split in name}
        for name in sorted(found.keys() | listed.keys()):
            if found.get(name) != listed.get(name):
                fail(f"{Path(data) / name}: {found.get(name, 'no')} tokens here, {listed.get(name, 'none')} in meta.json; run prepare_fineweb.py again")
        self.first = np.cumsum([0] + [max(0, n - 1) // block_size for *_, n in self.shards]) # number of the first window of each shard
        if not len(self):
            fail(f"{paths[0]}: the {split} split has no {block_size + 1} tokens in a row (block_size + 1); its longest shard has {max(found.values())}")

    def __len__(self):
        return int(self.first[-1])

    def check_ids(self, vocab_size):
        # every id of every shard; a progress bar where it takes long
        for path, dtype, offset, n in tqdm(self.shards, desc="checking ids", disable=None if len(self.shards) > 9 else True):
            for start in range(0, n if vocab_size < 2 ** (8 * dtype.itemsize) else 0, 1 << 24):
                ids = np.fromfile(path, dtype, min(1 << 24, n - start), offset=offset + start * dtype.itemsize)
                if ids.size and ids.max() >= vocab_size:
                    i = int((ids >= vocab_size).argmax())
                    fail(f"{path}: token {start + i} is {ids[i]}, not below vocab_size {vocab_size}; give --vocab_size or the right --data")

    def order(self, start, n):
        # the n windows from position `start` of an endless sequence of seeded permutations, one per epoch
        out = []
        for i in range(start, start + n):
            if i // len(self) != self.epoch:
                self.epoch = i // len(self)
                self.perm = np.random.default_rng((self.seed, self.epoch)).permutation(np.arange(len(self), dtype=np.uint32))
            out.append(int(self.perm[i % len(self)]))
        return out

    def batch(self, windows):
        # windows: numbers below len(self) -> x, y: (B, T) int64, y one token ahead
        rows = np.empty((len(windows), self.T + 1), np.int64)
        for row, w in zip(rows, windows):
            s = int(np.searchsorted(self.first, w, side="right")) - 1
            path, dtype, offset, _ = self.shards[s]
            ids = np.fromfile(path, dtype, self.T + 1, offset=offset + (w - int(self.first[s])) * self.T * dtype.itemsize)
            if len(ids) <= self.T or stamp(path) != self.stamps[path]:
                fail(f"{path}: the file changed during the run; the last checkpoint is untouched")
            row[:] = ids
        rows = torch.from_numpy(rows)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

# -----------------------------------------------------------------------------
# Muon

class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest semi-orthogonal matrix by five Newton-Schulz steps (Jordan et al., 2024). For hidden matrices only.

    Same-shape matrices go through one batched product, in bf16 on CUDA and FP32 on CPU; each process does its share of them. In FP32 two
    or three steps on a long matrix are multiplied together before it is; bf16 is too coarse for that.
    """

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.world, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)

    @staticmethod
    def orthogonalise(X):
        # X: (n, rows, cols), each matrix brought to singular values near 1
        tall = X.size(1) > X.size(2)
        X = X.mT if tall else X
        X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-20)
        long = X.dtype.itemsize > 2 and X.size(2) > 1.5 * X.size(1)
        for part in (2, 3) if long else (1, 1, 1, 1, 1):
            A, Y = X @ X.mT, None # (n, r, r), r the shorter side
            for t in range(part):
                A = B @ A @ B if t else A # (B X) (B X)^T: all of them are polynomials of the first
                B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315) # b A + c A A
                B.diagonal(dim1=1, dim2=2).add_(3.4445) # + a
                Y = B @ Y if t else B
            X = Y @ X
        return X.mT if tall else X

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for (rows, cols), ps in shapes.items():
                for p in ps:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                bufs, grads = [self.state[p]["momentum_buffer"] for p in ps], [p.grad for p in ps]
                torch._foreach_lerp_(bufs, grads, 1 - group["momentum"])
                share = -(-len(ps) // self.world) # matrices per process, the last share padded with zeros
                mine = range(self.rank * share, (self.rank + 1) * share)
                X = torch.stack([grads[i].lerp(bufs[i], group["momentum"]) if i < len(ps) else torch.zeros_like(ps[0]) for i in mine]) # (share, rows, cols)
                out = self.orthogonalise(X.bfloat16() if X.is_cuda else X).to(X.dtype)
                if self.world > 1:
                    gathered = [torch.empty_like(X) for _ in range(self.world)]
                    dist.all_gather(gathered, out.contiguous())
                    out = torch.cat(gathered)
                torch._foreach_mul_(ps, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(ps, list(out[:len(ps)].unbind()), alpha=-group["lr"] * max(1, rows / cols) ** 0.5)

def make_optimizers(model, cfg):
    # every parameter in exactly one; the peak learning rate travels in the group
    groups = model.param_groups()
    assert sorted(map(id, sum(groups.values(), []))) == sorted(map(id, model.parameters())), "param_groups must name every parameter once"
    optimizers = []
    if cfg.optimizer == "muon":
        optimizers.append(Muon([dict(params=groups.pop("matrix"), peak=cfg.muon_lr)], cfg.muon_lr, weight_decay=cfg.weight_decay))
    no_decay = groups.pop("no_decay")
    parts = [dict(params=sum(groups.values(), []), weight_decay=cfg.weight_decay), dict(params=no_decay, weight_decay=0.0)]
    parts = [dict(p, peak=cfg.learning_rate) for p in parts if p["params"]]
    optimizers.append(torch.optim.AdamW(parts, cfg.learning_rate, (cfg.beta1, cfg.beta2), cfg.eps, fused=True))
    return optimizers

# -----------------------------------------------------------------------------
# Run directory: config.json, log.jsonl, ckpt.pt, result.json

def write_atomic(path, write):
    # write(file) under a temporary name, flushed to the disk, then renamed: a reader sees the old file or the new one
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e: # torch.save reports a full disk as a RuntimeError
        with contextlib.suppress(OSError):
            tmp.unlink()
        why = "the disk is full, or the file too large" if isinstance(e, RuntimeError) else e.strerror or e
        fail(f"{path}: cannot be written ({why})" + "; the earlier one is untouched" * path.exists())

def write_json(path, value):
    write_atomic(path, lambda f: f.write((json.dumps(value, indent=1) + "\n").encode()))

def read_json(path):
    # the object in a JSON file, {} where there is none or where it is broken
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}

def differences(cfg, old):
    # {field: (value in the config `old`, value here)} of what makes another run
    return {k: (old.get(k), v) for k, v in vars(cfg).items() if k not in NOT_THE_RUN and old.get(k) != v}

def status_of(cfg):
    # "finished", "diverged" or "unfinished" where the run directory holds this very run, else None
    run = Path(cfg.out_dir) / cfg.run_name
    old, status = read_json(run / "config.json"), read_json(run / "result.json").get("status", "unfinished")
    return status if old and not differences(cfg, old) else None

def status_or_refuse(cfg, run):
    # the exit status of a run that has ended, None of one to begin or to resume; ends the program where the directory holds what it should not
    status, old = status_of(cfg), read_json(run / "config.json")
    if not old and (run / "ckpt.pt").exists(): # lost or damaged: the checkpoint has a copy
        old = read_checkpoint(run)["config"]
        status = "unfinished"
    if status in ("finished", "diverged"):
        print(f"already {status}: {run}")
        return 0 if status == "finished" else 3
    if cfg.resume and not old:
        fail(f"--resume: there is no run in {run}")
    fixed = {*config_fields(cfg.model), "model", "optimizer", "seed", "batch_tokens"} # the rest may change: a longer run
    other = [f"{k} {was} there, {now} here" for k, (was, now) in differences(cfg, old).items() if k in fixed or not cfg.resume]
    if old and other:
        fail(f"--{'resume' if cfg.resume else 'run_name'}: {run} holds another run ({'; '.join(other)}); choose another --run_name")
    if status and not cfg.resume:
        fail(f"--run_name: {run} holds this run, unfinished; add --resume to continue it")

def lock_run(run):
    # the run directory for this process alone, until it ends; also the proof that it can be written
    run.mkdir(parents=True, exist_ok=True)
    lock = open(run / "lock", "w")
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"--run_name: another process is at work in {run}")
    return lock

def write_config(cfg, run):
    # everything that made the run, before its first step and after all that could be refused
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=HERE, capture_output=True, text=True) # a shell, for a machine without git
    cfg.versions = dict(python=platform.python_version(), torch=str(torch.__version__), numpy=np.__version__)
    cfg.commit, cfg.command = git.stdout.strip(), shlex.join(sys.argv)
    (run / "result.json").unlink(missing_ok=True) # of a shorter schedule; first, or a kill in between would leave a result that is not of this config
    write_json(run / "config.json", vars(cfg))

def save(run, cfg, model, optimizers, step, seconds):
    if not all(w.isfinite().all() for w in model.state_dict().values()):
        return # the next loss says so; the last checkpoint is the one to keep
    ckpt = dict(model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers], step=step, seconds=seconds,
                rng=torch.get_rng_state(), config=vars(cfg))
    write_atomic(run / "ckpt.pt", lambda f: torch.save(ckpt, f))

def read_checkpoint(path, parts=("model", "config")):
    # the dict that train.py saved; prefixes of DDP and torch.compile are taken off the weights
    path = Path(path)
    path = path / "ckpt.pt" if path.is_dir() else path
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True) # never runs code from the file
        missing = [part for part in parts if part not in ckpt]
        if missing or not isinstance(ckpt["config"], dict):
            raise ValueError(f"without {', '.join(missing or ['a config'])}")
        ckpt["model"] = {re.sub(r"^(module\.|_orig_mod\.)+", "", k): v for k, v in ckpt["model"].items()}
    except Exception as e:
        fail(f"{path}: is not a checkpoint of train.py ({type(e).__name__}: {' '.join(str(e).split())[:200]})")
    return ckpt

def load_checkpoint(path):
    """(model, checkpoint) of a run directory or a ckpt.pt: weights in place, on the CPU, in eval mode; checkpoint["config"] is the run's config."""
    ckpt = read_checkpoint(path)
    name = ckpt["config"].get("model")
    if not isinstance(name, str) or name not in find_models():
        fail(f"{path}: its model {name!r} is in no model_*.py here")
    try:
        model = build_run(ckpt["config"])
        model.load_state_dict(ckpt["model"])
    except Exception as e:
        fail(f"{path}: does not fit model {name} ({' '.join(str(e).split())[:200]})")
    return model.eval(), ckpt

def own_tokenizer(ckpt):
    # the tokenizer that a checkpoint names; a file that it names may be anyone's, so it is not opened unless the user names it
    name = ckpt["config"].get("tokenizer", "gpt2")
    if not isinstance(name, str) or name.startswith("neox:"):
        fail(f"--tokenizer: the checkpoint says {name}; if that is a file of yours, give it: --tokenizer {shlex.quote(str(name))}")
    return name

def resume(run, cfg, model, optimizers, rank):
    # checkpoint of the run into model and optimizers -> (step, seconds); the log is cut there, what the lost steps had logged will be logged again
    step, seconds, path, log = 0, 0.0, run / "ckpt.pt", run / "log.jsonl"
    notes = [f"{run} has no checkpoint yet, starting at step 0"]
    if path.exists():
        ckpt = read_checkpoint(path, ("model", "config", "optimizers", "step", "seconds", "rng"))
        step, seconds = ckpt["step"], ckpt["seconds"]
        if not isinstance(step, int) or step < 0 or not isinstance(seconds, float):
            fail(f"{path}: is not a checkpoint of train.py (step {step!r}, seconds {seconds!r})")
        notes = [f"{k} {now} (was {was})" for k, (was, now) in differences(cfg, ckpt["config"]).items()]
        if step > cfg.steps:
            fail(f"--steps: {cfg.steps} is less than the {step} that the checkpoint has behind it")
        try:
            model.load_state_dict(ckpt["model"])
            for optimizer, state in zip(optimizers, ckpt["optimizers"], strict=True):
                for now, was in zip(optimizer.param_groups, state["param_groups"], strict=True): # hyper-parameters come from the flags, state from the file
                    was.update({k: v for k, v in now.items() if k != "params"})
                optimizer.load_state_dict(state)
            torch.set_rng_state(ckpt["rng"])
        except Exception as e:
            fail(f"{path}: does not fit ({' '.join(str(e).split())[:200]})")
    if rank == 0:
        print("".join(f"resume: {note}\n" for note in notes), end="")
        lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
        kept = [x for x in lines if (m := re.match(rb'\{"step": (\d{1,18}),', x)) and int(m[1]) < step + (b'"loss"' in x) and x.endswith(b"\n")]
        write_atomic(log, lambda f: f.writelines(kept))
    return step, seconds

# -----------------------------------------------------------------------------
# Sizes, without allocating anything

def activation_bytes(cfg):
    # estimate of what autograd keeps for one micro-batch, counted on small models: a parabola in n_layer, a line in vocab_size
    def saved(L, V, T):
        model = build_meta({**vars(cfg), "n_layer": L, "vocab_size": V, "block_size": T}).to_empty(device="cpu") # what is kept does not hang on the numbers,
        for b in model.buffers(): # unless they are an index
            b.zero_()
        idx, kept, weights = torch.zeros(1, T, dtype=torch.int64), {}, {p.untyped_storage().data_ptr() for p in model.parameters()}
        def pack(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage() # one that lives keeps its address
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            model(idx, idx)
        return sum(storage.nbytes() for ptr, storage in kept.items() if ptr not in weights)
    a, b, c, wide = ((saved(L, V, 16) - saved(L, V, 8)) / 8 for L, V in ((3, 64), (4, 64), (5, 64), (3, 128))) # bytes per token
    x, y = cfg.n_layer - 3, (cfg.vocab_size - 64) / 64
    return round((a + x * (b - a) + x * (x - 1) / 2 * (c - 2 * b + a) + y * (wide - a)) * cfg.micro_batch * cfg.block_size)

def dry_run(argv, activations=True):
    cfg, given = parse(argv)
    model = settle(cfg, given, int(os.environ.get("WORLD_SIZE", 1)))
    n, T, V, d = model.num_params(), cfg.block_size, cfg.vocab_size, cfg.n_embd
    matrix = sum(p.numel() for p in model.param_groups()["matrix"]) if cfg.optimizer == "muon" else 0
    print(json.dumps(dict(
        model=cfg.model, n_params=n, n_params_backbone=n - 2 * V * d, n_params_embedding=2 * V * d, n_params_depth=n - preln_params(cfg), block_size=T,
        flops_forward=model.flops(T), flops_prefill=model.flops(T) - 2 * (T - 1) * d * V, tokens_per_step=cfg.batch_tokens, steps=cfg.steps, tokens=cfg.tokens,
        learning_rate=cfg.learning_rate, bytes_weights=4 * n, bytes_optimizer=8 * n - 4 * matrix,
        bytes_activations=activation_bytes(cfg) if activations else None, out_dir=cfg.out_dir, run_name=cfg.run_name, status=status_of(cfg))), flush=True)

def dry_runs(argv):
    # one line of flags per line of stdin, one JSON (or {"error": ...}) per line of stdout, all in this process
    status = 0
    for line in sys.stdin:
        err = io.StringIO()
        try:
            words = shlex.split(line)
            if {"-h", "--help"}.intersection(words):
                raise ValueError("--help: ask without --dry_run")
            with contextlib.redirect_stderr(err):
                dry_run([*argv, *words], activations=False)
        except (SystemExit, ValueError) as e: # ValueError: an open quote
            status = 1
            print(json.dumps({"error": err.getvalue().strip() or f"error: {e}"}), flush=True)
    return status

# -----------------------------------------------------------------------------
# Training

def autocast(cfg):
    return torch.autocast(cfg.device, torch.bfloat16) if cfg.dtype == "bfloat16" else contextlib.nullcontext()

@torch.no_grad()
def validate(model, loader, cfg, rank=0, world=1):
    # mean loss over the first eval_tokens of the split, the same windows whatever the run and the number of processes
    n = min(len(loader), max(1, cfg.eval_tokens // cfg.block_size))
    total = torch.zeros((), dtype=torch.float64)
    for i in range(rank * cfg.micro_batch, n, world * cfg.micro_batch):
        x, y = loader.batch(range(i, min(i + cfg.micro_batch, n)))
        with autocast(cfg):
            total += model(x.to(cfg.device), y.to(cfg.device))[1].double().cpu() * len(x)
    total = total.to(cfg.device, torch.float64)
    if world > 1:
        dist.all_reduce(total)
    return total.item() / n

def layer_stats(model, cfg, x, y):
    # per block: norm and variance of hidden, and the gradient norm of what the block added to the state
    def parts(state): # its tensors
        return [state] if torch.is_tensor(state) else [t for s in state for t in parts(s)]
    with autocast(cfg):
        states = [model.begin(model.embed(x))]
        for block in model.h:
            states.append(block(states[-1]))
        loss = model.head(model.readout(states[-1]), y)[1]
    hidden = [model.hidden(s, l).detach().double() for l, s in enumerate(states)][1:]
    new = [[t for t in parts(s) if t.requires_grad and not any(t is u for u in parts(r))] for r, s in zip(states, states[1:])]
    grads = iter(torch.autograd.grad(loss, sum(new, []), allow_unused=True))
    return dict(norm=[h.norm(dim=-1).mean().item() for h in hidden], variance=[h[:, 1:].var().item() for h in hidden],
                grad_norm=[sum(g.double().square().sum().item() for _, g in zip(n, grads) if g is not None) ** 0.5 for n in new])

def speed_up(model, cfg, rank=0):
    # kernels.py and torch.compile, each in place; depth mixing stays outside the compiled part. Returns what swaps the kernels out again
    module, undo = sys.modules[type(model).__module__], None
    if cfg.device == "cpu" and platform.libc_ver()[0] == "glibc": # what is freed stays here, where the next step asks for it again
        for option, value in ((-3, 2**25), (-1, 2**31 - 1)): # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, value)
    if cfg.fused != "off":
        import kernels
        if cfg.fused == "on" or kernels.gains(module, cfg.device):
            try:
                undo = kernels.fuse(module, say=print if rank == 0 else lambda _: None)
            except ValueError as e:
                fail(f"--fused: {e}; use --fused off")
    if cfg.compile:
        whole = not undo and not getattr(module, "GROWS", False)
        for block in model.h:
            for part in [block] if whole else [block.mlp] if hasattr(module, "depth_attention") else [block.attn, block.mlp]:
                part.compile()
    return undo

def train(cfg, run, model, data, val, rank, world, caught):
    # the loop: returns the exit status
    optimizers = make_optimizers(model, cfg)
    step, seconds = resume(run, cfg, model, optimizers, rank) if cfg.resume else (0, 0.0)
    if rank == 0:
        write_config(cfg, run)
        if cfg.wandb:
            import wandb
            board = wandb.init(project="nanodepth", name=cfg.run_name, config=vars(cfg), resume="allow")
    undo = speed_up(model, cfg, rank)
    net = DistributedDataParallel(model) if world > 1 else model
    share = cfg.batch_tokens // cfg.block_size // world # sequences of this process per step
    accum, val_loss, status = share // cfg.micro_batch, None, "finished"
    def write(**line): # one object a line, for programs
        if rank == 0:
            with open(run / "log.jsonl", "a", encoding="utf-8") as log:
                print(json.dumps(line), file=log)
            if cfg.wandb:
                board.log(line, step=line["step"])
    bar = tqdm(total=cfg.steps, initial=step, desc=cfg.run_name, disable=None if rank == 0 else True, dynamic_ncols=True)
    while True:
        last = step == cfg.steps
        if last or cfg.eval_every and step % cfg.eval_every == 0: # the clock stands still
            val_loss = validate(model, val, cfg, rank, world)
            write(step=step, val_loss=val_loss, tokens=step * cfg.batch_tokens)
            if rank == 0:
                tqdm.write(f"step {step}/{cfg.steps} | val loss {val_loss:.4f}")
            if not math.isfinite(val_loss): # the last step went wrong
                status = "diverged"
                break
        if rank == 0 and cfg.layer_stats_every and step % cfg.layer_stats_every == 0:
            if undo: # on the plain model
                undo()
            write(step=step, layer_stats=layer_stats(model, cfg, *(t.to(cfg.device) for t in val.batch(range(min(cfg.micro_batch, len(val)))))))
            if undo:
                undo = sys.modules["kernels"].fuse(sys.modules[type(model).__module__], say=lambda _: None)
        if rank == 0 and (last or cfg.save_every and step and step % cfg.save_every == 0):
            save(run, cfg, model, optimizers, step, seconds)
        if last:
            break
        start, total = time.perf_counter(), torch.zeros(2, device=cfg.device) # loss, signals
        windows = data.order((step * world + rank) * share, share)
        for micro in range(accum):
            x, y = (t.to(cfg.device, non_blocking=True) for t in data.batch(windows[micro * cfg.micro_batch:(micro + 1) * cfg.micro_batch]))
            # gradients are averaged over the processes on the last micro-step only
            with net.no_sync() if world > 1 and micro < accum - 1 else contextlib.nullcontext():
                with autocast(cfg):
                    loss = net(x, y)[1] / accum
                loss.backward()
            total[0] += loss.detach() / world
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
        total += torch.stack((norm - norm, norm.new_tensor(len(caught)))) # nan where the norm is not finite
        if world > 1:
            dist.all_reduce(total) # every process sees the same loss and the same wish to stop
        loss, stop = total.tolist()
        if not math.isfinite(loss):
            status = "diverged"
            break
        lr = lr_at(step, cfg, cfg.learning_rate)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, cfg, group["peak"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, took = step + 1, max(time.perf_counter() - start, 1e-9)
        seconds += took
        bar.update()
        if rank == 0 and (step % cfg.log_every == 0 or step == cfg.steps):
            report(cfg, model, step, loss, lr, norm.item(), took, world, write)
        if stop and step < cfg.steps:
            status = "stopped"
            break
    bar.close()
    if undo:
        undo()
    if rank == 0 and status == "stopped":
        save(run, cfg, model, optimizers, step, seconds)
        print(f"stopped at step {step}, saved; the same command with --resume continues", file=sys.stderr)
    elif rank == 0:
        finish(cfg, run, model, status, step, val_loss, seconds, world)
    return dict(finished=0, diverged=3).get(status, 128 + (caught[0] if caught else signal.SIGTERM))

def report(cfg, model, step, loss, lr, norm, took, world, write):
    # the line for people, and the same as an object
    rate = cfg.batch_tokens / took
    speed = f"{took * 1e3:.0f} ms | " + (f"{rate / 1e6:.2f}M tok/s" if rate > 1e6 else f"{rate:.0f} tok/s")
    line = f"step {step}/{cfg.steps} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.3f} | {speed}"
    peak = next((v for k, v in PEAK_FLOPS.items() if cfg.device == "cuda" and k in torch.cuda.get_device_name()), 0)
    if peak:
        line += f" | mfu {3 * model.flops(cfg.block_size) / cfg.block_size * rate / peak / world:.1%}"
    write(step=step, loss=loss, lr=lr, grad_norm=norm, ms=took * 1e3, tok_per_s=rate, tokens=step * cfg.batch_tokens)
    tqdm.write(line)

def finish(cfg, run, model, status, step, val_loss, seconds, world):
    # result.json of a run that has ended, and the last words
    n, tokens = model.num_params(), step * cfg.batch_tokens
    peak = torch.cuda.max_memory_allocated() if cfg.device == "cuda" else resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write_json(run / "result.json", dict(
        status=status, step=step, val_loss=val_loss if status == "finished" else None, tokens=tokens, seconds=seconds, tok_per_s=tokens / max(seconds, 1e-9),
        peak_memory=peak, n_params=n, n_params_depth=n - preln_params(cfg), world_size=world,
        model=cfg.model, n_layer=cfg.n_layer, n_embd=cfg.n_embd, learning_rate=cfg.learning_rate, seed=cfg.seed))
    if status == "diverged":
        print(f"error: diverged at step {step}: loss or gradient is not finite; the last checkpoint is untouched; try a lower --learning_rate", file=sys.stderr)
    else:
        print(f"finished: val loss {val_loss:.4f}, {seconds:.0f} s, checkpoint in {run / 'ckpt.pt'}")

def announce(cfg, model, data, world):
    sizes = {k: sum(p.numel() for p in ps) for k, ps in model.param_groups().items()}
    depth = model.num_params() - preln_params(cfg)
    print(f"{cfg.model}: {model.num_params():,} parameters, {depth:+,} against preln; " + ", ".join(f"{k} {n:,}" for k, n in sizes.items() if n))
    print(f"{cfg.optimizer}, learning rate {cfg.learning_rate:g}, {cfg.steps} steps of {cfg.batch_tokens:,} tokens = {cfg.tokens:,}; "
          f"{world} process(es) x {cfg.micro_batch} sequences of {cfg.block_size}")
    print(f"{cfg.device}, {cfg.dtype}, compile {cfg.compile}, fused {cfg.fused}; {len(data):,} windows in {cfg.data}, tokenizer {cfg.tokenizer}")

def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    cfg, given = parse(argv)
    if cfg.dry_run == "-":
        return dry_runs([a for a in argv if a not in ("--dry_run", "-", "--dry_run=-")])
    if cfg.dry_run:
        return dry_run(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    if cfg.preset == "nano" and rank == 0 and "data" not in given and read_json(Path(cfg.data) / "meta.json").get("complete") is not True:
        import prepare_fineweb
        prepare_fineweb.main(["--source", "stdlib", "--out_dir", cfg.data])
    if world > 1: # the others wait here for the data
        dist.init_process_group("gloo" if cfg.ddp_backend == "gloo" or not torch.cuda.is_available() else "nccl")
    wait = dist.barrier if world > 1 else lambda: None
    caught, before = [], {} # Ctrl-C and SIGTERM: those that came, and what handled them before
    try:
        settle(cfg, given, world)
        if cfg.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            if cfg.dtype == "float32": # in bfloat16 the only FP32 products are those of the routing, which stay FP32
                torch.set_float32_matmul_precision("high")
        data, val = Loader(cfg.data, "train", cfg.block_size, cfg.seed), Loader(cfg.data, "val", cfg.block_size)
        if rank == 0:
            data.check_ids(cfg.vocab_size)
            val.check_ids(cfg.vocab_size)
        run = Path(cfg.out_dir) / cfg.run_name
        status = status_or_refuse(cfg, run)
        wait() # all have looked before one writes
        if status is not None:
            return status
        lock = lock_run(run) if rank == 0 else contextlib.nullcontext()
        wait()
        torch.manual_seed(cfg.seed)
        model = build_run(vars(cfg)).to(cfg.device)
        if rank == 0:
            announce(cfg, model, data, world)
        for s in (signal.SIGINT, signal.SIGTERM): # the loop saves and ends; a second one kills
            before[s] = signal.signal(s, lambda s, _: (caught.append(s), signal.signal(s, signal.SIG_DFL)))
        with lock:
            return train(cfg, run, model, data, val, rank, world, caught)
    except OSError as e:
        if not e.filename: # a full disk, or a pipe whose reader has gone: nothing more goes there
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        fail(f"{e.filename or f'stdout or the log of {cfg.run_name}'}: {e.strerror or e}")
    except RuntimeError as e:
        if world > 1 and (isinstance(e, dist.DistError) or "gloo" in str(e)):
            fail("another process of this run has ended, see its own message; the last checkpoint is untouched, --resume continues")
        if cfg.compile and type(e).__module__.startswith("torch._"):
            fail(f"--compile: {str(e).splitlines()[0]}; use --no-compile")
        raise
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        if world > 1:
            if isinstance(error := sys.exc_info()[1], SystemExit): # gloo can hang while what an error leaves is torn down, and all others with it
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(error.code)
            dist.destroy_process_group()

if __name__ == "__main__":
    sys.exit(main())
