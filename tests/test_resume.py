"""
train.py across interruptions and processes: exact resume, signals, full disks, checkpoints of others, one process against two.
Run alone: python -m pytest -q tests/test_resume.py
"""
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ddp_worker import argv, ckpt, gradients, make_data, record, refused, same, same_end

import train

NAMES = sorted(train.find_models())
ENV = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}

def contents(run):
    return {p.name: p.read_bytes() for p in run.iterdir()}

# -----------------------------------------------------------------------------
# Exact resume

def check_resume(flags, tmp_path, stop, **kw):
    straight = record(flags(run_name="straight", **kw))
    half = record(flags(run_name="half", **kw), stop)
    rest = record(flags(run_name="half", resume="true", **kw))
    assert (straight["status"], half["status"], rest["status"]) == (0, 143, 0)
    assert straight["tokens"] == half["tokens"] + rest["tokens"] and len(half["tokens"]) == stop
    assert same_end(tmp_path / "straight", tmp_path / "half")

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ten_steps(flags, tmp_path, optimizer):
    check_resume(flags, tmp_path, 5, steps=10, optimizer=optimizer, eval_every=5, micro_batch=2)

@pytest.mark.parametrize("name", NAMES)
def test_every_model(flags, tmp_path, name):
    check_resume(flags, tmp_path, 1, steps=2, model=name, optimizer="muon")

@pytest.mark.parametrize("name", NAMES)
def test_every_model_in_bfloat16(flags, tmp_path, name):
    loss = {}
    for dtype in ("float32", "bfloat16"):
        train.main(flags(run_name=dtype, model=name, dtype=dtype, optimizer="muon", steps=1, batch_tokens=64, eval_tokens=16))
        loss[dtype] = json.loads((tmp_path / dtype / "log.jsonl").read_text().splitlines()[0])["loss"] # the first, before any update
    assert loss["float32"] != loss["bfloat16"] and abs(loss["float32"] - loss["bfloat16"]) < 1e-2

@pytest.mark.parametrize("twin", ["Muon state lost", "AdamW state lost", "data from the start"])
def test_resume_broken(flags, tmp_path, twin, monkeypatch):
    if "data" in twin:
        order = train.Loader.order
        def restart(self, start, n):
            self.zero = getattr(self, "zero", start)
            return order(self, start - self.zero, n)
        monkeypatch.setattr(train.Loader, "order", restart)
    else:
        cls = train.Muon if "Muon" in twin else torch.optim.AdamW
        monkeypatch.setattr(cls, "load_state_dict", lambda *_: None)
    with pytest.raises(AssertionError):
        check_resume(flags, tmp_path, 2, steps=4, optimizer="muon")

def test_longer_schedule(flags, tmp_path, capsys):
    train.main(flags(steps=2, learning_rate=1e-3))
    capsys.readouterr()
    train.main(flags(steps=4, learning_rate=2e-3, resume="true"))
    out = capsys.readouterr().out
    assert "steps 4 (was 2)" in out and "learning_rate 0.002 (was 0.001)" in out and ckpt(tmp_path / "r")["step"] == 4
    before = contents(tmp_path / "r")
    refused(capsys, flags(steps=3, learning_rate=2e-3, resume="true"), "steps", "3", "4")
    assert contents(tmp_path / "r") == before

def test_refuses_another_model(flags, tmp_path, capsys):
    train.main(flags(model="hc", steps=2))
    before = contents(tmp_path / "r")
    capsys.readouterr()
    for change in (dict(model="preln"), dict(n_layer=3), dict(n_embd=32), dict(block_size=8), dict(vocab_size=320), dict(n_streams=2), dict(optimizer="muon"), dict(seed=5),
                   dict(n_layer=3, n_head=4), dict(batch_tokens=256)):
        refused(capsys, flags(**{**dict(model="hc", steps=2, resume="true"), **change}), *[part for k, v in change.items() for part in (k, v)])
        assert contents(tmp_path / "r") == before

# -----------------------------------------------------------------------------
# Interruptions

@pytest.mark.parametrize("moment, sig", [("evaluation", signal.SIGINT), ("save", signal.SIGTERM)])
def test_signal_while(moment, sig, flags, tmp_path, monkeypatch, capsys):
    # a signal in an evaluation or in a save: seen after the next step, saved, said in one line, and resumed to the same end
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    kw = dict(steps=6, eval_every=2, save_every=2)
    train.main(flags(run_name="straight", **kw))
    owner, name = (train, "validate") if moment == "evaluation" else (torch, "save")
    right, calls = getattr(owner, name), []
    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), sig)
        return right(*args)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        assert train.main(flags(**kw)) == 128 + sig
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--resume continues" in err
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers and ckpt(tmp_path / "r")["step"] in (3, 5)
    train.main(flags(resume="true", **kw))
    assert same_end(tmp_path / "straight", tmp_path / "r")

def test_sigkill(flags, tmp_path):
    # another process, killed at any moment of a run that always saves
    run = tmp_path / "r"
    with subprocess.Popen([sys.executable, train.__file__, *flags(steps=100000, save_every=2)], env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
        try:
            end = time.time() + 200
            while p.poll() is None and time.time() < end and not ((run / "log.jsonl").exists() and (run / "log.jsonl").read_bytes().count(b"\n") > 4):
                time.sleep(0.005)
        finally:
            p.kill()
        assert p.wait() == -signal.SIGKILL, p.stderr.read()
    step = train.load_checkpoint(run)[1]["step"]
    assert step > 1 and not (run / "result.json").exists()
    straight = record(flags(run_name="straight", steps=100000), stop=step + 2)
    rest = record(flags(steps=100000, save_every=2, resume="true"), stop=2)
    assert straight["tokens"][step:] == rest["tokens"] and same(straight["weights"], rest["weights"])

def test_half_written_is_never_seen(tmp_path):
    path = tmp_path / "x"
    train.write_atomic(path, lambda f: f.write(b"old"))
    def half(f):
        f.write(b"ne")
        f.flush()
        assert path.read_bytes() == b"old" # SIGKILL here
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train.write_atomic(path, half)
    assert path.read_bytes() == b"old"

def test_disk_full(flags, tmp_path, capsys):
    train.main(flags(steps=2))
    before = (tmp_path / "r" / "ckpt.pt").read_bytes()
    capsys.readouterr()
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGINT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, limit[1]))
    try:
        refused(capsys, flags(steps=4, save_every=1, resume="true"), tmp_path / "r" / "ckpt.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert signal.getsignal(signal.SIGINT) is handler # as before the run
    assert (tmp_path / "r" / "ckpt.pt").read_bytes() == before and not [p for p in (tmp_path / "r").iterdir() if "tmp" in p.name]
    train.main(flags(steps=4, resume="true"))
    assert ckpt(tmp_path / "r")["step"] == 4

# -----------------------------------------------------------------------------
# Checkpoints of others

def test_prefixes(flags, tmp_path):
    train.main(flags(steps=4, run_name="straight"))
    assert record(flags(steps=4), stop=2)["status"] == 143
    good = ckpt(tmp_path / "r")
    for prefix in ("_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."):
        torch.save({**good, "model": {prefix + k: v for k, v in good["model"].items()}}, tmp_path / "r" / "ckpt.pt")
        model, _ = train.load_checkpoint(tmp_path / "r")
        assert same(model.state_dict(), good["model"]) and not model.training
    train.main(flags(steps=4, resume="true"))
    assert same(ckpt(tmp_path / "r")["model"], ckpt(tmp_path / "straight")["model"])

def test_parts_and_strangers(flags, tmp_path, capsys):
    assert record(flags(steps=4), stop=2)["status"] == 143
    good, path = ckpt(tmp_path / "r"), tmp_path / "r" / "ckpt.pt"
    capsys.readouterr()
    for part in ("optimizers", "step", "rng", "model", "config"):
        torch.save({k: v for k, v in good.items() if k != part}, path)
        refused(capsys, flags(steps=4, resume="true"), path, part)
    torch.save({"model": {k: v.bfloat16() for k, v in good["model"].items()}, "config": good["config"]}, path) # enough for sampling
    assert all(v.dtype == torch.float32 and torch.equal(v, good["model"][k].bfloat16().float()) for k, v in train.load_checkpoint(path)[0].state_dict().items())
    strangers = {"text": lambda: path.write_text("hello"), "random": lambda: torch.save([1], path), "cut": lambda: path.write_bytes(path.read_bytes()[:-2000]),
                 "partial": lambda: torch.save({**good, "model": {k: v for k, v in good["model"].items() if "norm_f" not in k}}, path)}
    torch.save(good, path)
    for name in ("cut", "text", "random", "partial"):
        strangers[name]()
        refused(capsys, flags(steps=4, resume="true"), path)
        with pytest.raises(SystemExit):
            train.load_checkpoint(path)
        assert capsys.readouterr().err.count("\n") == 1
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)
    torch.save({**good, "config": Evil()}, path)
    refused(capsys, flags(steps=4, resume="true"), path)
    assert not (tmp_path / "evil").exists() # code in a checkpoint is never run
    path.unlink()
    assert train.main(flags(steps=4, resume="true")) == 0 and "no checkpoint yet" in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in (path.parent / "log.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 4] # the lost steps are logged once

# -----------------------------------------------------------------------------
# Two processes: one launch for all cases

FUSED = ["attnres", "attnres_block", "hc", "mgr", "mhc", "moda"]
PAIRS = [(optimizer, accum) for optimizer in ("adamw", "muon") for accum in (1, 2, 4)]

def start_early(out):
    data, cases = make_data(out / "data"), {}
    def case(name, stop=None, twin=0, **kw):
        cases[name] = argv(**{"data": data, "out_dir": out, "run_name": name, **kw}), stop, twin
    for optimizer, accum in PAIRS:
        case(f"{optimizer} {accum}", optimizer=optimizer, micro_batch=4 // accum, steps=5)
    case("twin", micro_batch=1, steps=5, twin=4)
    ten = dict(steps=10, optimizer="muon", micro_batch=2, eval_every=5)
    case("straight", **ten), case("half", stop=5, **ten), case("half 1", stop=5, **ten), case("rest", **{**ten, "run_name": "half", "resume": "true"})
    for name in NAMES:
        case(f"model {name}", model=name, n_layer=3, steps=2, micro_batch=2, optimizer="muon")
    for name in FUSED: # last: kernels.fuse swaps for the whole process
        case(f"fused {name}", model=name, n_layer=3, steps=2, micro_batch=2, optimizer="muon", fused="on")
    (out / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(Path(__file__).with_name("ddp_worker.py")), str(out / "cases.json"), str(out / "seen")]
    with open(out / "stderr", "w") as stderr:
        return subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=stderr), out

@pytest.fixture
def two(early):
    # {case: what each of the two ranks recorded}, and the directory of the runs
    process, out = early
    assert process.wait(timeout=500) == 0, (out / "stderr").read_text()[-3000:]
    return seen(out), out

@functools.cache
def seen(out):
    ranks = [torch.load(out / f"seen.{r}") for r in (0, 1)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}

def tokens(ranks):
    assert not any(set(a) & set(b) for a, b in zip(*[r["tokens"] for r in ranks])) # no rank sees what the other sees
    return [sorted(a + b) for a, b in zip(*[r["tokens"] for r in ranks])]

def check_pair(ranks, one, accum):
    assert [r["status"] for r in ranks] == [0, 0] and tokens(ranks) == [sorted(t) for t in one["tokens"]]
    largest = max(g.abs().max() for g in one["grads"])
    flat = lambda ws: torch.cat([w.double().flatten() for w in ws])
    for r in ranks:
        assert max((a - b).abs().max() for a, b in zip(r["grads"], one["grads"])) <= 1e-6 * largest
        a, b = flat(r["weights"]), flat(one["weights"])
        assert (a - b).abs().max() <= 2e-5 and (a - b).norm() <= 2e-6 * b.norm()
        assert {micro for _, micro in r["syncs"]} == {accum * (s + 1) for s in range(len(one["tokens"]))} # on the last micro-step of every step, and on no other
    assert same(ranks[0]["weights"], ranks[1]["weights"])

@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    return {optimizer: record(argv(data=data, out_dir=out, run_name=optimizer, optimizer=optimizer, steps=5)) for optimizer in ("adamw", "muon")}

@pytest.mark.parametrize("optimizer, accum", PAIRS)
def test_one_process_and_two(two, one, optimizer, accum):
    check_pair(two[0][f"{optimizer} {accum}"], one[optimizer], accum)

def test_one_and_two_broken(two, one):
    ranks = two[0]["twin"]
    assert {micro % 4 for _, micro in ranks[0]["syncs"]} == {1} # the gradients of the first micro-step alone are averaged
    with pytest.raises(AssertionError):
        check_pair(ranks, one["adamw"], 4)
    assert max((a - b).abs().max() for a, b in zip(ranks[0]["grads"], one["adamw"]["grads"])) > 1e-4
    assert not same(ranks[0]["weights"], ranks[1]["weights"])

def test_resume_on_two(two):
    seen, out = two
    assert [r["status"] for r in seen["half"]] == [143, 143] # the signal reached the last rank alone
    assert tokens(seen["half"]) + tokens(seen["rest"]) == tokens(seen["straight"])
    assert same_end(out / "straight", out / "half")

def test_resume_of_two_on_one(two, data, tmp_path):
    seen, out = two
    shutil.copytree(out / "half 1", tmp_path / "half 1")
    rest = record(argv(data=data, out_dir=tmp_path, run_name="half 1", steps=10, optimizer="muon", micro_batch=8, eval_every=5, resume="true"))
    assert rest["status"] == 0 and [sorted(t) for t in rest["tokens"]] == tokens(seen["straight"])[5:]
    assert all((v - ckpt(out / "straight")["model"][k]).abs().max() < 2e-5 for k, v in ckpt(tmp_path / "half 1")["model"].items())

def test_fused_attnres_without_sync(two):
    # the gradients of two ranks, two micro-steps each, in FP64: those of the plain model on all four
    want = gradients()
    for got in two[0]["no sync"]:
        assert all((got[n] - want[n]).abs().max() < 1e-12 * want[n].abs().max() for n in want) and same(got, two[0]["no sync"][0])

@pytest.mark.parametrize("name", NAMES)
def test_every_model_on_two(two, data, tmp_path, name):
    one = record(argv(data=data, out_dir=tmp_path, run_name="one", model=name, n_layer=3, steps=2, optimizer="muon"))
    for kind in ("model", "fused")[:1 + (name in FUSED)]:
        check_pair(two[0][f"{kind} {name}"], one, 2)
        val = [json.loads((run / "result.json").read_text())["val_loss"] for run in (tmp_path / "one", two[1] / f"{kind} {name}")]
        assert abs(val[0] - val[1]) < 1e-5
