"""
train.py in one process: sizes, schedule, flags, data, Muon, and what a run does and leaves behind.
Run alone: python -m pytest -q tests/test_train.py
"""
import fcntl
import importlib.util
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from ddp_worker import argv, random_ids, record, same, shard

import train

NAMES = sorted(train.find_models())

@pytest.fixture
def go(data, tmp_path):
    # go(flag=value, ...) runs train.main, asserts its exit status and returns the run directory
    def go(code=0, run_name="r", **flags):
        try:
            status = train.main(argv(**{"data": data, "out_dir": tmp_path / "out", "run_name": run_name, **flags}))
        except SystemExit as e:
            status = e.code
        assert (status or 0) == code
        return tmp_path / "out" / run_name
    return go

def one_line(err, *parts):
    assert err.startswith("error: ") and err.count("\n") == 1 and all(str(p) in err for p in parts), (parts, err)

def lines(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]

def weights(run):
    return torch.load(run / "ckpt.pt", weights_only=True)["model"]

# -----------------------------------------------------------------------------
# Sizes and schedule

SHAPES = [ # n_layer, n_embd, d_ff, parameters: to the unit where spec.md gives them, else the millions that the paper prints
    (16, 1216, 3248, 406534336), (20, 1120, 2992, 414087520), (24, 1024, 2736, 405406720), (28, 960, 2560, 406249920), (32, 896, 2400, 399358848),
    (42, 800, 2144, 404151200), (70, 640, 1712, 409229440), # Table 3
    (16, 1248, 3328, 425), (42, 768, 2048, 375), (70, 608, 1632, 373), (84, 544, 1456, 354), # Table 7, less what Table 3 has
    (24, 672, 1792, 198), (18, 768, 2048, 205), (12, 896, 2400, 206), (28, 800, 2144, 296), (21, 896, 2400, 293), (14, 1056, 2816, 294),
    (34, 992, 2656, 502), (26, 1120, 2992, 504), (17, 1344, 3584, 504), # Table 8, less what Table 3 has
    (28, 2048, 6144, 1615349760), (40, 1728, 5184, 1607179968), (54, 1504, 4512, 1617192544)] # Table 9

def dry_runs(monkeypatch, capsys, *rows, code=0):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(rows)))
    assert train.main(["--dry_run", "-"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

def check_sizes(shapes, outs, V=50280, T=2048):
    assert len(shapes) == len(outs)
    for (L, d, d_ff, n), out in zip(shapes, outs):
        d_kv = d // 2 if n > 1e9 else d
        matrices = 2 * d * d + 2 * d * d_kv + 3 * d * d_ff
        want = L * (matrices + 2 * d) + d + 2 * V * d
        assert want == n if n > 1e6 else abs(want - n * 1e6) < 1e6, (L, d)
        assert (out["n_params"], out["n_params_embedding"], out["n_params_backbone"], out["n_params_depth"]) == (want, 2 * V * d, want - 2 * V * d, 0)
        assert out["flops_forward"] == L * (2 * T * matrices + 2 * T * T * d) + 2 * T * d * V
        assert out["flops_prefill"] == out["flops_forward"] - 2 * (T - 1) * d * V
        assert (out["steps"], out["tokens"]) == (round(20 * want / 2**20), round(20 * want / 2**20) * 2**20)

def test_sizes_of_the_papers_tables(monkeypatch, capsys):
    rows = [f"--n_layer {L} --n_embd {d} --vocab_size 50280" + f" --n_kv_head 8 --d_ff {3 * d}" * (n > 1e9) for L, d, _, n in SHAPES]
    outs = dry_runs(monkeypatch, capsys, *rows)
    check_sizes(SHAPES, outs)
    for shape in ((16, 1216, 3232, 406534336), (17, 1216, 3248, 406534336)): # a wrong d_ff, a wrong depth
        with pytest.raises(AssertionError):
            check_sizes([shape], outs[:1])

def test_dry_run(monkeypatch, capsys, go, tmp_path):
    good, bad, hc = dry_runs(monkeypatch, capsys, "--n_layer 2 --n_embd 64", "--n_layer 2 --n_embd 50", "--n_layer 2 --n_embd 64 --model hc", code=1)
    assert list(bad) == ["error"] and "50" in bad["error"] and good["n_params"] + hc["n_params_depth"] == hc["n_params"] and good["tokens"] == hc["tokens"]
    go(dry_run="run")
    assert json.loads(capsys.readouterr().out)["bytes_activations"] > 0 and not (tmp_path / "out").exists()

@pytest.mark.parametrize("name", {path: name for name, (path, _) in train.find_models().items()}.values()) # one of each file
def test_activations_are_counted_on_weights_of_any_value(name, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True) # with NaN, or with the largest integer
    torch.use_deterministic_algorithms(True)
    try:
        cfg, given = train.parse(argv(model=name))
        train.settle(cfg, given)
        assert train.activation_bytes(cfg) > 0
    finally:
        torch.use_deterministic_algorithms(False)

def check_schedule(lr, N, W, peak, low):
    assert lr[0] == pytest.approx(peak / W) and lr[W - 1] == pytest.approx(peak, rel=1e-12) == max(lr)
    assert W == N or lr[-1] == low
    assert all(a < b for a, b in zip(lr[:W], lr[1:W])) and all(a > b for a, b in zip(lr[W - 1:], lr[W:]))
    for s in range(W, N): # the distance to the floor falls as cos^2
        assert lr[s] - low == pytest.approx((peak - low) * math.cos(math.pi / 2 * (s - W + 1) / (N - W)) ** 2, abs=1e-9)

@pytest.mark.parametrize("N, frac, W", [(1, 0.1, 1), (3, 0.1, 1), (10, 0.0, 1), (10, 0.2, 2), (7605, 0.1, 760), (10, 1.0, 10)])
def test_schedule(N, frac, W):
    cfg = train.SimpleNamespace(steps=N, warmup_frac=frac, min_lr_frac=0.1)
    lr = [train.lr_at(s, cfg, 2e-3) for s in range(N)]
    check_schedule(lr, N, W, 2e-3, 2e-3 * 0.1)
    if N > W: # the twins: rate 0 at the first step, floor reached one step late
        for twin in ([0, *lr[:-1]], [train.lr_at(s, cfg, 2e-3) for s in range(N - 1)] + [lr[-2]]):
            with pytest.raises(AssertionError):
                check_schedule(twin, N, W, 2e-3, 2e-3 * 0.1)

# -----------------------------------------------------------------------------
# Flags

REFUSED = [ # flags, exit status, what the one line names
    ("--lerning_rate=1", 2, "learning_rate"), ("--n_lay=4", 2, "n_layer"), ("--learning-rate=1", 2, "--learning_rate"), ("stray", 2, "stray"), ("n_layer=4", 2, "n_layer"),
    ("--seed=1 --seed=1", 2, "twice"), ("--n_streams=4", 2, "hc"), ("--lr=1", 2, "unknown"), ("--no-n_layer", 2, "n_layer"), ("--no-wandb=1", 2, "unknown"), ("--steps=10.5", 2, "10.5"), ("--steps=ten", 2, "ten"),
    ("--steps", 2, "value"), ("--model", 2, "value"), ("--learning_rate=nan", 2, "nan"), ("--learning_rate=inf", 2, "inf"), ("--learning_rate=1,000", 2, "1,000"), ("--vocab_size=None", 2, "None"),
    ("--compile=maybe", 2, "maybe"), ("--compile=", 2, "compile"), ("--tokens=1 --steps=1", 2, "excludes"), ("--model=prelm", 1, "preln"), ("--preset=big", 1, "nano"),
    ("--n_head=5", 1, "n_embd: 16 n_head 5"), ("--n_head=0", 1, "n_head: 0"), ("--n_head=-2", 1, "-2"), ("--n_head=16", 1, "odd"), ("--n_embd=0", 1, "n_embd: 0"), ("--n_layer=0", 1, "n_layer: 0"),
    ("--n_kv_head=3", 1, "n_kv_head: 3"), ("--batch_tokens=100", 1, "100 16"), ("--batch_tokens=0", 1, "batch_tokens: 0"), ("--micro_batch=3", 1, "3 8"), ("--micro_batch=0", 1, "micro_batch: 0"),
    ("--learning_rate=-1", 1, "-1"), ("--weight_decay=-.1", 1, "-0.1"), ("--grad_clip=-1", 1, "-1"), ("--beta2=1", 1, "beta2 1.0"), ("--warmup_frac=2", 1, "warmup_frac"), ("--steps=-2", 1, "-2"),
    ("--eval_every=-1", 1, "eval_every"), ("--dtype=float16", 1, "float16 bfloat16"), ("--dtype=bf16", 1, "bf16"), ("--device=mps", 1, "mps"), ("--optimizer=sgd", 1, "sgd muon"), ("--seed=-1", 1, "-1"),
    ("--run_name=a/b", 1, "a/b"), ("--out_dir=", 1, "out_dir"), ("--data=nowhere", 1, "nowhere prepare_fineweb.py --out_dir"), ("--block_size=4096 --batch_tokens=4096 --micro_batch=1", 1, "4097 3000"),
    ("--vocab_size=255", 1, "255"), ("--resume", 1, "no run"), ("--out_dir=/proc/x", 1, "/proc/x")]
REFUSED += [] if importlib.util.find_spec("wandb") else [("--wandb", 1, "wandb pip install")]
REFUSED += [] if torch.cuda.is_available() else [("--device=cuda", 1, "CUDA"), ("--ddp_backend=nccl", 1, "CUDA")]

@pytest.mark.parametrize("flags, code, words", REFUSED, ids=[r[0] for r in REFUSED])
def test_refused(flags, code, words, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = argv(data=data, out_dir="out", run_name="r")
    with pytest.raises(SystemExit) as e:
        train.main([a for a in base if a.split("=")[0] not in flags.replace("=", " ").split()] + flags.split())
    one_line(capsys.readouterr().err, *words.split())
    assert e.value.code == code and not list(tmp_path.iterdir()) # nothing written

def test_refused_for_every_model(capsys):
    for name in NAMES:
        with pytest.raises(SystemExit):
            train.main(argv(model=name, n_head=5))
        one_line(capsys.readouterr().err, "n_embd: 16", "n_head 5")

def test_no_data_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        train.main([])
    one_line(capsys.readouterr().err, tmp_path / "data" / "fineweb_edu", "python prepare_fineweb.py")

def test_spellings():
    for text, want in {"false": False, "False": False, "0": False, "no": False, "TRUE": True, "1": True, "yes": True}.items():
        assert train.parse([f"--compile={text}"])[0].compile is want and train.parse(["--wandb", text])[0].wandb is want
    assert train.parse(["--compile"])[0].compile is True and train.parse(["--no-compile", "--seed", "3"])[0].compile is False
    cfg, given = train.parse(["--learning_rate=1", "--steps", "1e3", "--n_layer", "4.0", "--min_lr_frac", ".001", "--out_dir", "a=b/run 1", "--seed=1099511627776"])
    assert (cfg.learning_rate, cfg.steps, cfg.n_layer, cfg.min_lr_frac, cfg.out_dir, cfg.seed) == (1.0, 1000, 4, 0.001, "a=b/run 1", 2**40)
    assert type(cfg.learning_rate) is float and type(cfg.steps) is int and type(cfg.n_layer) is int and "steps" in given and "dtype" not in given
    cfg, _ = train.parse(["--preset", "nano", "--tokens", "81920"]) # the command line beats the preset
    assert (cfg.tokens, cfg.steps, cfg.n_embd) == (81920, -1, 64)
    rates = {n: train.parse(["--model", n])[0].learning_rate for n in NAMES}
    assert all(rates[n] == v for n, v in dict(preln=2e-3, lns=1e-2, deepnorm=1e-3, hc=2e-3, mhc=2e-3, keel=2e-3).items()) # Table 4
    assert train.parse(["--model", "lns", "--learning_rate", "3e-4"])[0].learning_rate == 3e-4

def test_help(capsys):
    with pytest.raises(SystemExit) as e:
        train.main(["--model", "hc", "--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0 and all(f"--{f} " in out for f in [*train.TrainConfig.__dataclass_fields__, "n_layer", "n_streams"]) and all(f" {n}" in out for n in NAMES)

def test_two_processes_need_two_sequences(data, capsys):
    cfg, given = train.parse(argv(data=data, batch_tokens=16))
    with pytest.raises(SystemExit):
        train.settle(cfg, given, world_size=2)
    one_line(capsys.readouterr().err, "16", "2 processes")

# -----------------------------------------------------------------------------
# Data

FORMATS = [("train_000000.bin", "<u2", (20240520, 1)), ("fineweb_train_000001.bin", "<u2", (20240520, 1)), ("train_000000.bin", "<u4", (20240801, 7)), ("train.bin", "<u2", None)]

@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("name, dtype, magic", FORMATS)
def test_formats(name, dtype, magic, meta, tmp_path):
    ids = random_ids(1000, 60000)
    shard(tmp_path / name, ids, dtype, magic)
    if meta:
        (tmp_path / "meta.json").write_text(json.dumps(dict(tokenizer="gpt2", vocab_size=60000, complete=True, tokens={name: 1000})))
    loader = train.Loader(tmp_path, "train", 7)
    x, y = loader.batch(range(len(loader)))
    assert len(loader) == 999 // 7 and x.dtype == torch.int64
    assert (x.numpy() == ids[:994].reshape(-1, 7)).all() and (y.numpy() == ids[1:995].reshape(-1, 7)).all()

def test_windows_stay_inside_a_shard(tmp_path):
    ids = [random_ids(94, seed=s) for s in (0, 1)]
    for s in (0, 1):
        shard(tmp_path / f"train_{s}.bin", ids[s])
    loader = train.Loader(tmp_path, "train", 5)
    x, y = loader.batch(loader.order(0, 36))
    rows = {tuple(r) for r in torch.cat((x, y[:, -1:]), 1).tolist()}
    assert len(loader) == 36 and x.shape == (36, 5) # 93 // 5 in each
    assert rows == {tuple(shard_ids[i:i + 6].tolist()) for shard_ids in ids for i in range(0, 90, 5)}

def test_offsets_past_4_gib(tmp_path):
    path, T = tmp_path / "train.bin", 1024
    shard(path, random_ids(5000) + 1, magic=None)
    with open(path, "r+b") as f: # sparse: takes no room
        f.truncate(5 << 30)
        last = ((5 << 29) - 1) // T - 1
        for w in (2**31 // T + 3, last):
            f.seek(2 * w * T)
            f.write(np.arange(w % 1000, w % 1000 + T + 1).astype("<u2").tobytes())
    loader = train.Loader(tmp_path, "train", T)
    assert len(loader) == last + 1
    for w in (2**31 // T + 3, last):
        x, y = loader.batch([w])
        assert (x[0].numpy() == np.arange(w % 1000, w % 1000 + T)).all() and y[0, -1] == w % 1000 + T

def broken_meta(d, **change):
    (d / "meta.json").write_text(json.dumps({**dict(tokenizer="bytes", vocab_size=256, complete=True, tokens={"train_0.bin": 2000}), **change}))

BROKEN = { # what is wrong -> (how, what the one line names); the directory holds train_0.bin of 2000 tokens and val_0.bin of 300
    "truncated": (lambda d: (d / "train_0.bin").write_bytes((d / "train_0.bin").read_bytes()[:-1000]), "train_0.bin 2000 1500"),
    "count too large": (lambda d: shard(d / "val_0.bin", random_ids(300), claim=301), "val_0.bin 301 300"),
    "cut inside the header": (lambda d: (d / "train_0.bin").write_bytes((d / "train_0.bin").read_bytes()[:900]), "train_0.bin"),
    "magic": (lambda d: shard(d / "train_0.bin", random_ids(2000), magic=(12345, 1)), "train_0.bin 12345"),
    "version": (lambda d: shard(d / "train_0.bin", random_ids(2000), magic=(20240520, 2)), "train_0.bin 2"),
    "4-byte ids, 2-byte header": (lambda d: shard(d / "train_0.bin", random_ids(2000), "<u4"), "train_0.bin 2000 4000"),
    "4-byte ids, no header": (lambda d: shard(d / "train_0.bin", random_ids(2000), "<u4", None), "train_0.bin 8000"),
    "odd number of bytes": (lambda d: (d / "train_0.bin").write_bytes(random_ids(2000).astype("<u2").tobytes() + b"\7"), "train_0.bin 4001"),
    "id in the middle": (lambda d: shard(d / "train_0.bin", np.where(np.arange(2000) == 1007, 300, random_ids(2000))), "train_0.bin 1007 300 256"),
    "last id of val": (lambda d: shard(d / "val_0.bin", [*random_ids(299), 65535]), "val_0.bin 299 65535 256"),
    "val of T tokens": (lambda d: shard(d / "val_0.bin", random_ids(16)), "val_0.bin 17 16"),
    "empty": (lambda d: (d / "train_0.bin").write_bytes(b""), "train_0.bin 17 0"),
    "no val": (lambda d: (d / "val_0.bin").unlink(), "val prepare_fineweb.py"),
    "shard missing": (lambda d: broken_meta(d, tokens={"train_0.bin": 2000, "train_1.bin": 2000}), "train_1.bin 2000"),
    "shard of another length": (lambda d: broken_meta(d, tokens={"train_0.bin": 1999}), "train_0.bin 1999"),
    "shard not listed": (lambda d: broken_meta(d, tokens={"val_0.bin": 300}), "train_0.bin 2000 meta.json"),
    "not complete": (lambda d: broken_meta(d, complete=False), "complete"),
    "meta.json cut short": (lambda d: (d / "meta.json").write_text('{"vocab'), "meta.json"),
    "meta.json of another": (lambda d: (d / "meta.json").write_text("[1]"), "meta.json")}

@pytest.mark.parametrize("fault", BROKEN)
def test_broken_data(fault, go, tmp_path, capsys):
    shard(tmp_path / "d" / "train_0.bin", random_ids(2000))
    shard(tmp_path / "d" / "val_0.bin", random_ids(300, seed=1))
    spoil, words = BROKEN[fault]
    spoil(tmp_path / "d")
    assert not go(1, data=tmp_path / "d").exists()
    one_line(capsys.readouterr().err, *words.split())

def test_val_of_one_window(go, tmp_path):
    shard(tmp_path / "d" / "train.bin", random_ids(2000), magic=None)
    shard(tmp_path / "d" / "val.bin", random_ids(17), magic=None)
    assert math.isfinite(lines(go(data=tmp_path / "d", steps=1))[-1]["val_loss"])

def check_order(data):
    new = lambda seed=1: train.Loader(data, "train", 16, seed)
    n = len(new())
    whole = new().order(0, 3 * n)
    for epoch in range(3): # each epoch takes every window once, in an order of its own
        assert sorted(whole[epoch * n:(epoch + 1) * n]) == list(range(n))
    assert whole[:n] != whole[n:2 * n] != sorted(whole[:n]) and whole != new(2).order(0, 3 * n)
    loader = new() # a function of the position alone, not of what was asked before
    assert [w for start in (5, n - 3, 2 * n - 4, 0) for w in loader.order(start, 8)] == [w for start in (5, n - 3, 2 * n - 4, 0) for w in whole[start:start + 8]]

def test_order(data, monkeypatch):
    check_order(data)
    def no_seed(self, start, n):
        return [int(np.random.default_rng(i // len(self)).permutation(len(self))[i % len(self)]) for i in range(start, start + n)]
    def stateful(self, start, n):
        self.rng = getattr(self, "rng", np.random.default_rng(self.seed))
        return [w for _ in range(3) for w in self.rng.permutation(len(self)).tolist()][:n]
    for twin in (no_seed, stateful, lambda self, start, n: [i % len(self) for i in range(start, start + n)]):
        monkeypatch.setattr(train.Loader, "order", twin)
        with pytest.raises(AssertionError):
            check_order(data)

# -----------------------------------------------------------------------------
# Muon

def muon_reference(w, grads, lr=0.02, momentum=0.95, decay=0.1):
    # the same iteration in FP64, one matrix at a time; also the momentum
    w, buf = w.double(), torch.zeros_like(w, dtype=torch.float64)
    for g in grads:
        buf = momentum * buf + (1 - momentum) * g.double()
        X = momentum * buf + (1 - momentum) * g.double()
        X = (X.T if w.size(0) > w.size(1) else X) / X.norm()
        for _ in range(5):
            A = X @ X.T
            X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
        w = (1 - lr * decay) * w - lr * max(1, w.size(0) / w.size(1)) ** 0.5 * (X.T if w.size(0) > w.size(1) else X)
    return w, buf

def check_muon(monkeypatch):
    torch.manual_seed(0)
    ws = [torch.randn(s) for s in ((24, 24), (48, 16), (16, 48), (24, 24), (48, 16))]
    grads = [[torch.randn_like(w) for w in ws] for _ in range(3)]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in ws] for _ in range(2))
    a, b = train.Muon(ours), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone) # torch's iteration, in FP32
        for gs in grads:
            for p, q, g in zip(ours, theirs, gs):
                p.grad, q.grad = g.clone(), g.clone()
            a.step(), b.step()
    for i, w in enumerate(ws):
        want, buf = muon_reference(w, [gs[i] for gs in grads])
        assert (ours[i] - want).abs().max() < 2e-6 and (ours[i] - theirs[i]).abs().max() < 2e-6
        assert (a.state[ours[i]]["momentum_buffer"] - buf).abs().max() < 1e-6 # not written into

def test_muon(monkeypatch):
    check_muon(monkeypatch)
    right, lerp = train.Muon.orthogonalise, torch._foreach_lerp_
    for twin in (lambda X: X, lambda X: right(right(X)), lambda X: right(X) * 1.01):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(train.Muon, "orthogonalise", staticmethod(twin))
            check_muon(monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(torch, "_foreach_lerp_", lambda bufs, grads, weight: lerp(bufs, grads, 1 - weight))
        check_muon(monkeypatch)

@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (64, 256)])
def test_muon_singular_values(shape):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape) @ torch.diag(torch.logspace(-1, 1, shape[1]))
    train.Muon([p], lr=1.0).step()
    s = torch.linalg.svdvals(p.detach()) / max(1, shape[0] / shape[1]) ** 0.5
    assert s.max() < 1.5 and (s > 0.5).float().mean() > 0.9
    assert s.max() / s.median() < 2 < torch.linalg.svdvals(p.grad).max() / torch.linalg.svdvals(p.grad).median() # SGD would keep the spread

def test_muon_odd_gradients():
    torch.manual_seed(0)
    g = torch.randn(8, 12)
    def update(*gs, decay=0.0):
        ps = [torch.nn.Parameter(torch.ones(8, 12)) for _ in gs]
        for p, g in zip(ps, gs):
            p.grad = g
        train.Muon(ps, weight_decay=decay).step()
        return [p.detach() - 1 for p in ps]
    one, small, tiny, large, zero, none = update(g, 1e-10 * g, 1e-18 * g, 1e10 * g, 0 * g, None)
    assert all((u - one).abs().max() < 1e-6 for u in (small, tiny, large)) and one.abs().max() > 1e-3
    assert not zero.any() and not none.any() # none of them spoils its neighbours in the batch
    assert torch.allclose(update(0 * g, decay=0.5)[0], torch.full((8, 12), -0.01)) and not update(None, decay=0.5)[0].any()
    assert all(torch.isfinite(u).all() for u in update(1e-38 * g, 1e30 * g))

# name endings that are not decayed (spec.md section 21)
NO_DECAY = dict(model_preln=(), model_norms=(), model_hc=("A", "B"), model_mhc=("b", "alpha"), model_attnres=(), model_moda=(),
                model_layerrope=("alpha", "beta", "alpha_rot", "beta_rot"), model_mgr=("c",))

@pytest.mark.parametrize("name", NAMES)
def test_routing(name):
    model = train.build(name, n_layer=3, n_head=2, n_embd=16, block_size=16, vocab_size=64)
    names = {p: n for n, p in model.named_parameters()}
    cfg = train.parse(["--model", name, "--optimizer", "muon", "--weight_decay", "0.1"])[0]
    muon, adamw = train.make_optimizers(model, cfg)
    (matrices,) = muon.param_groups
    assert isinstance(muon, train.Muon) and {re.sub(r"h\.\d+\.", "", names[p]) for p in matrices["params"]} - {"kv_mlp.weight"} == {
        "attn.wqkv.weight", "attn.wo.weight", "mlp.w13.weight", "mlp.w2.weight"} and len(matrices["params"]) >= 12
    assert sorted(names[p] for o in (muon, adamw) for g in o.param_groups for p in g["params"]) == sorted(names.values())
    free = {names[p] for g in adamw.param_groups if g["weight_decay"] == 0 for p in g["params"]}
    stem = train.find_models()[name][0].stem
    if stem in NO_DECAY: # a reader's own model may decay what it likes
        assert free == {n for n in names.values() if n.split(".")[-1] in NO_DECAY[stem]}
    adamw, = train.make_optimizers(model, train.parse(["--model", name])[0])
    assert len({id(p) for g in adamw.param_groups for p in g["params"]}) == len(names)

# -----------------------------------------------------------------------------
# Runs

def test_what_a_run_leaves(go, capsys):
    run = go(eval_every=3, optimizer="muon")
    assert {p.name for p in run.iterdir()} == {"ckpt.pt", "config.json", "log.jsonl", "result.json", "lock"}
    out, result, config = capsys.readouterr().out, json.loads((run / "result.json").read_text()), json.loads((run / "config.json").read_text())
    assert f"checkpoint in {run / 'ckpt.pt'}" in out.splitlines()[-1] and re.search(r"step 6/6 \| loss \d\.\d{4} \| lr \d\.\d\de-\d\d \| norm \d\.\d{3} \| \d+ ms \| \d+ tok/s", out)
    log = lines(run)
    assert [x["step"] for x in log if "val_loss" in x] == [0, 3, 6] and [x["step"] for x in log if "loss" in x] == [1, 2, 3, 4, 5, 6]
    cfg = train.SimpleNamespace(**config)
    assert [x["lr"] for x in log if "loss" in x] == [train.lr_at(s, cfg, cfg.learning_rate) for s in range(6)]
    ckpt = torch.load(run / "ckpt.pt", weights_only=True)
    assert [g["lr"] for o in ckpt["optimizers"] for g in o["param_groups"]] == [pytest.approx(0.1 * v) for v in (cfg.muon_lr, cfg.learning_rate)]
    assert result["status"] == "finished" and result["val_loss"] == log[-1]["val_loss"] and result["tokens"] == 6 * 128 and result["n_params"] == 14928 and result["seed"] == 0
    assert ckpt["step"] == 6 and config["versions"]["torch"] == torch.__version__ and {"commit", "command", "d_ff"} <= config.keys() and {"tok_per_s", "seconds", "peak_memory"} <= result.keys()
    assert not any(re.search(r"module\.|_orig_mod\.", k) for k in ckpt["model"])

def test_steps(go):
    run = go(run_name="0", steps=0, save_every=1)
    start = weights(run)
    assert [list(x) for x in lines(run)] == [["step", "val_loss", "tokens"]]
    for n in (1, 3): # exactly n updates, a last evaluation and a last checkpoint whatever the intervals
        run = go(run_name=str(n), steps=n, eval_every=100, save_every=100)
        states = torch.load(run / "ckpt.pt", weights_only=True)["optimizers"][0]["state"].values()
        assert {s["step"].item() for s in states} == {n} and [x["step"] for x in lines(run) if "val_loss" in x] == [0, n]
        assert not same(weights(run), start)

def check_evaluation_is_free(go, tag):
    rare = torch.load(go(run_name=f"{tag} rare") / "ckpt.pt", weights_only=True)
    often = torch.load(go(run_name=f"{tag} often", eval_every=1, save_every=1, layer_stats_every=1, log_every=2, eval_tokens=64) / "ckpt.pt", weights_only=True)
    for part in ("model", "optimizers", "rng"):
        assert same(rare[part], often[part])

def test_evaluation_is_free(go, monkeypatch):
    check_evaluation_is_free(go, "right")
    def backward(model, loader, cfg, *_): # the twin leaves gradients behind
        loss = model(*loader.batch(range(4)))[1]
        loss.backward()
        return loss.item()
    monkeypatch.setattr(train, "validate", backward)
    with pytest.raises(AssertionError):
        check_evaluation_is_free(go, "twin")

def test_layer_stats(go):
    stats = [x["layer_stats"] for x in lines(go(layer_stats_every=3, n_layer=3)) if "layer_stats" in x]
    assert len(stats) == 3 and all(len(s[k]) == 3 and min(s[k]) > 0 for s in stats for k in ("norm", "variance", "grad_norm"))

def test_accumulation_is_a_mean(go):
    # the printed loss and norm and the weights are those of the whole batch
    a, b = go(run_name="8", micro_batch=8), go(run_name="1", micro_batch=1)
    for x, y in zip(lines(a), lines(b)):
        assert all(x[k] == pytest.approx(y[k], rel=1e-5) for k in x if k in ("loss", "grad_norm", "val_loss", "lr"))
    assert all((v - weights(b)[k]).abs().max() < 2e-5 for k, v in weights(a).items())

def test_zeros(go):
    start, still, free, loose, tight = (weights(go(run_name=name, **flags)) for name, flags in dict(
        start=dict(steps=0), still=dict(learning_rate=0), free=dict(grad_clip=0), loose=dict(grad_clip=1e9), tight=dict(grad_clip=0.01)).items())
    assert same(still, start) and same(free, loose) and not same(free, tight) and not same(free, start) # clip 0 is off

def test_seeds(data, tmp_path):
    runs = {name: record(argv(data=data, out_dir=tmp_path, run_name=name, seed=seed, steps=2)) for name, seed in dict(a=1, b=1, c=2, d=2**40).items()}
    assert same(runs["a"], runs["b"]) and json.loads((tmp_path / "d" / "result.json").read_text())["seed"] == 2**40
    for other in "cd":
        assert runs["a"]["tokens"] != runs[other]["tokens"] and not same(runs["a"]["weights"], runs[other]["weights"])

def test_finished_and_used_directories(go, capsys):
    run = go(seed=1)
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    capsys.readouterr()
    for again in (dict(), dict(resume="true"), dict(micro_batch=1, eval_every=1)):
        go(seed=1, **again)
        assert "already finished" in capsys.readouterr().out
    go(1, seed=2)
    one_line(capsys.readouterr().err, "seed 1 there, 2 here", "--run_name")
    assert before == {p.name: p.read_bytes() for p in run.iterdir()}
    (run / "result.json").unlink()
    go(1, seed=1)
    one_line(capsys.readouterr().err, "--resume")
    with open(run / "lock") as lock: # two at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        go(1, seed=1, resume="true")
    one_line(capsys.readouterr().err, run, "another process")
    file = run / "config.json" # a file is no directory
    go(1, out_dir=file)
    one_line(capsys.readouterr().err, file)

@pytest.mark.parametrize("name, flags", [("preln", dict(learning_rate=1e4, grad_clip=0, steps=60, warmup_frac=0)), ("hc", dict(learning_rate=1e4, grad_clip=0, steps=60, warmup_frac=0)),
                                         ("preln", dict(learning_rate=1e38, grad_clip=0, steps=1))])
def test_divergence(name, flags, go, capsys):
    run = go(3, model=name, save_every=1, **flags)
    strict = dict(parse_constant=lambda s: pytest.fail(f"{s} is not JSON"))
    result = json.loads((run / "result.json").read_text(), **strict)
    assert result["status"] == "diverged" and 0 < result["step"] <= flags["steps"]
    one_line(capsys.readouterr().err, "diverged", f"step {result['step']}", "learning_rate")
    assert result["step"] == 1 or all(v.isfinite().all() for v in weights(run).values()) # the last good one is kept
    assert go(3, model=name, save_every=1, **flags) == run and "already diverged" in capsys.readouterr().out

def test_nan_in_one_used_row(go, data, monkeypatch):
    build, loader = train.build, train.Loader(data, "train", 16)
    used = loader.batch(loader.order(0, 1))[0][0, 0]
    def spoiled(*args, **fields):
        model = build(*args, **fields)
        model.wte.weight.data[used, 3] = math.nan
        return model
    monkeypatch.setattr(train, "build", spoiled)
    run = go(3)
    assert json.loads((run / "result.json").read_text())["step"] == 0 and not (run / "ckpt.pt").exists()
