"""
What happens when things go wrong: tried often, counted, printed as tables. Not collected by pytest; tests/test_faults.py runs a little of each.

    python tests/faults.py kills --n 100       SIGKILL at random moments of runs that save at every step; all resume, to the same bits
    python tests/faults.py matrix              every other kind of fault once: what was lost, and what the message says
    python tests/faults.py fuzz --n 10000      random flags through --dry_run -, and a tenth as many damaged files
    python tests/faults.py numerics            eager and compiled, FP32 and BF16, plain and fused, one process and two (--only NAME)

Seeded (--seed), on the CPU, in a temporary directory. Exit status 1 if anything was lost, hung, or ended in a traceback.
"""
import argparse
import contextlib
import importlib
import io
import json
import math
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from ddp_worker import argv, ckpt, log, make_data, same_end
from tqdm import tqdm

import train

NAMES = sorted(train.find_models())
PATIENCE = 120 # seconds until something counts as hanging

# -----------------------------------------------------------------------------
# Runs in forked copies of this process: torch is imported already, so that a start takes a tenth of a second

def start(args, err, spoil=contextlib.nullcontext, env={}):
    # train.main(args) in a child -> its process id; spoil: a context manager that is entered there first; stderr goes to the file err
    pid = os.fork()
    if pid:
        return pid
    status = 70 # a traceback
    with contextlib.suppress(BaseException): # a full disk takes no traceback either
        try:
            os.setpgid(0, 0)
            os.environ.update(env)
            sys.stdout, sys.stderr = open(os.devnull, "w"), open(err, "w")
            os.dup2(sys.stderr.fileno(), 2)
            with spoil():
                status = train.main(args) or 0
        except SystemExit as e:
            status = e.code
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)

def wait(pid, seconds=PATIENCE):
    # exit status, -9 after SIGKILL and so on, None if it had to be ended here
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

def run(args, err, *rest):
    return wait(start(args, err, *rest))

def warm(tmp):
    # imports what a first run imports, so that no child has to; -> the data of all runs
    data = make_data(tmp / "data")
    for name in NAMES:
        train.load_module(train.find_models()[name][0])
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        train.main(argv(data=data, out_dir=tmp, run_name="warm", steps=1))
    return data

# -----------------------------------------------------------------------------
# kills

def kills(n, seed, tmp, steps=20):
    # SIGKILL after a random time, again and again, each design in turn -> counts
    rng, data, told = random.Random(seed), warm(tmp), dict(kills=0, resumes=0, runs=0, in_save=0, bit_equal=0, steps_lost=0)
    bar = tqdm(total=n, desc="kills", disable=None)
    while told["kills"] < n:
        name = NAMES[told["runs"] % len(NAMES)]
        flags = dict(data=data, out_dir=tmp, model=name, steps=steps, save_every=1, eval_every=7, optimizer=rng.choice(("adamw", "muon")))
        straight, cut = tmp / f"straight {told['runs']}", tmp / f"cut {told['runs']}"
        told["runs"] += 1
        began = time.monotonic()
        assert run(argv(**flags, run_name=straight.name), tmp / "err") == 0, (tmp / "err").read_text()
        life, saved = time.monotonic() - began, 0
        while True:
            begun = (cut / "config.json").exists()
            pid = start(argv(**flags, run_name=cut.name, resume=begun), tmp / "err")
            if told["kills"] < n:
                time.sleep(rng.uniform(0, life / 2))
                os.kill(pid, signal.SIGKILL)
            status = wait(pid)
            assert status in (0, -9), f"{name}: exit {status}: {(tmp / 'err').read_text()}"
            told["resumes"] += begun
            if status == 0:
                break
            told["kills"] += 1
            told["in_save"] += (cut / "ckpt.pt.tmp").exists()
            step = ckpt(cut)["step"] if (cut / "ckpt.pt").exists() else 0 # always whole, and never an earlier one
            assert step >= saved, f"{name}: step {step} after {saved}"
            reached = max((x["step"] for x in map(json.loads, (cut / "log.jsonl").read_text().splitlines())), default=0) if (cut / "log.jsonl").exists() else 0
            told["steps_lost"] += max(0, reached - step)
            saved = step
            bar.update()
        assert same_end(straight, cut), f"{name}: another end"
        assert {p.name for p in cut.iterdir()} == {p.name for p in straight.iterdir()}, "left over"
        told["bit_equal"] += 1
        shutil.rmtree(cut), shutil.rmtree(straight)
    bar.close()
    return told

# -----------------------------------------------------------------------------
# matrix

@contextlib.contextmanager
def at(step, what):
    # what(parameters) in that step of the run, its gradients being there
    clip, calls = torch.nn.utils.clip_grad_norm_, []
    def clipped(params, *rest):
        params = list(params)
        calls.append(1)
        if len(calls) == step:
            what(params)
        return clip(params, *rest)
    with mock.patch("torch.nn.utils.clip_grad_norm_", clipped):
        yield

def send(*signals):
    return lambda params: [os.kill(os.getpid(), s) for s in signals]

def full(limit): # a disk that takes no file beyond so many bytes
    return lambda params: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

def read_only(params): # modes do not bind root
    right = open
    def refuse(path, mode="r", *rest, **kw):
        if "w" in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return right(path, mode, *rest, **kw)
    train.open = refuse

def spoil_weight(params):
    params[0].data[0] = math.nan

def broken_pipe(params): # as after `| head`
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    sys.stdout = open(1, "w", buffering=1)

def no_file(params): # this process alone can no longer read the data
    def gone(path, *rest, **kw):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    np.fromfile = gone

def backwards(params):
    now = iter(range(10**9, 0, -100))
    time.time = time.perf_counter = lambda: next(now)

def other_ids(data):
    return lambda params: [p.write_bytes(p.read_bytes()[:1024] + b"\xff" * (p.stat().st_size - 1024)) for p in data.glob("*.bin")]

def faults(data):
    # name: (what happens, to processes 0 and 1 where there are two; exit status; words of the message)
    return {
        "SIGKILL": ([send(signal.SIGKILL)], -9, ""),
        "SIGTERM": ([send(signal.SIGTERM)], 143, "--resume continues"),
        "Ctrl-C": ([send(signal.SIGINT)], 130, "--resume continues"),
        "Ctrl-C twice": ([send(signal.SIGINT, signal.SIGINT)], -2, ""),
        "disk full in a save": ([full(20_000)], 1, "ckpt.pt: cannot be written"),
        "disk full in the log": ([full(300)], 1, "log of"),
        "directory read-only": ([read_only], 1, "ckpt.pt: cannot be written"),
        "directory removed": ([lambda params: shutil.rmtree(data.parent / "r")], 1, ""),
        "data deleted": ([lambda params: [p.unlink() for p in data.glob("*.bin")]], 1, "No such file"),
        "data shrinks": ([lambda params: [os.truncate(p, 1100) for p in data.glob("*.bin")]], 1, "changed during the run"),
        "other ids in the data": ([other_ids(data)], 1, "changed during the run"),
        "clock backwards": ([backwards], 0, ""),
        "nobody reads stdout": ([broken_pipe], 1, "stdout or the log of r: Broken pipe"),
        "NaN": ([spoil_weight], 3, "diverged"),
        "a rank is killed": ([None, send(signal.SIGKILL)], 1, "another process"),
        "a rank is told to stop": ([None, send(signal.SIGTERM)], 143, "--resume continues"),
        "NaN on a rank": ([None, spoil_weight], 3, "diverged"),
        "a rank without data": ([None, no_file], 1, "another process"),
        "a rank with a full disk": ([full(20_000), None], 1, "ckpt.pt: cannot be written")}

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

def start_all(args, spoils, err):
    # one process, or two as torchrun would start them
    env = dict(WORLD_SIZE=str(len(spoils)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())) if len(spoils) > 1 else {}
    return [start(args, err.with_suffix(f".{rank}"), spoil, env and {**env, "RANK": str(rank)}) for rank, spoil in enumerate(spoils)]

def left(pids):
    # the process groups of these that are still there
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, 0)
            found.append(pid)
    return found

def one_fault(name, step, data, tmp):
    # the fault in that step -> (message, what was lost)
    (tmp / "err.0").unlink(missing_ok=True)
    shards, (whats, code, words) = {p: p.read_bytes() for p in data.iterdir()}, faults(data)[name]
    shutil.rmtree(tmp / "r", ignore_errors=True)
    flags = dict(data=data, out_dir=tmp, steps=8, save_every=2, eval_every=3, micro_batch=2)
    world, straight, r = len(whats), tmp / f"straight {len(whats)}", tmp / "r"
    if not straight.exists():
        assert [wait(p) for p in start_all(argv(**flags, run_name=straight.name), [contextlib.nullcontext] * world, tmp / "err")] == [0] * world
    pids = start_all(argv(**flags, run_name="r"), [lambda w=w: at(step, w) if w else contextlib.nullcontext() for w in whats], tmp / "err")
    ends = [wait(p) for p in pids]
    for path, raw in shards.items():
        path.write_bytes(raw)
    said = (tmp / "err.0").read_text().strip()
    assert ends[0] == code and words in said and said.count("\n") == 0 and not left(pids), f"{name} in step {step}: {ends}, {said}"
    if name == "directory removed":
        return said, "nothing else"
    saved = (step - 1) // 2 * 2 # the checkpoint before the fault
    assert not (saved or code > 128) or ckpt(r)["step"] >= saved and all(w.isfinite().all() for w in ckpt(r)["model"].values()), name
    if code in (0, 3):
        assert json.loads((r / "result.json").read_text())["status"] == ("diverged" if code else "finished")
    if code not in (0, 3):
        again = [wait(p) for p in start_all(argv(**flags, run_name="r", resume=True), [contextlib.nullcontext] * world, tmp / "err")]
        assert again == [0] * world, (name, (tmp / "err.0").read_text())
    assert code == 3 or same_end(straight, r), f"{name} in step {step}: another end"
    return said, "nothing"

def torchrun_kill(data, tmp):
    # a rank of a real torchrun is killed -> (message, what was lost); no process of it stays
    args = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", train.__file__, *argv(data=data, out_dir=tmp, run_name="torchrun", steps=10**6, save_every=2)]
    p, end, ranks = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True), time.monotonic() + PATIENCE, []
    try:
        while p.poll() is None and not (tmp / "torchrun" / "ckpt.pt").exists() and time.monotonic() < end:
            time.sleep(0.1)
        ranks = [int(x) for x in subprocess.run(["ps", "-o", "pid=", "--ppid", str(p.pid)], capture_output=True, text=True).stdout.split()]
        os.kill(ranks[-1], signal.SIGKILL)
        said = [line for line in p.communicate(timeout=PATIENCE)[1].splitlines() if line.startswith("error: ")]
        assert p.returncode and not any(Path(f"/proc/{r}").exists() for r in ranks), "left behind"
    finally:
        for pid in (p.pid, *ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert ckpt(tmp / "torchrun")["step"] >= 2
    return (said or ["(torchrun's own report)"])[0], "nothing"

def second(data, tmp):
    # three more processes in the directory of a running one
    flags = dict(data=data, out_dir=tmp, steps=60, save_every=1, eval_every=7)
    assert run(argv(**flags, run_name="alone"), tmp / "err") == 0
    first = start(argv(**flags, run_name="shared"), tmp / "err")
    while not (tmp / "shared" / "ckpt.pt").exists():
        time.sleep(0.005)
    said = []
    for resume in (True, False, True):
        assert run(argv(**flags, run_name="shared", resume=resume), tmp / "err.second") == 1
        said.append((tmp / "err.second").read_text().strip())
        assert said[-1].count("\n") == 0 and "another process" in said[-1] or not resume and "unfinished" in said[-1], said
    assert wait(first) == 0 and same_end(tmp / "alone", tmp / "shared")
    return said[0], "nothing"

def matrix(n, seed, tmp, only=""):
    rng, data, ok = random.Random(seed), warm(tmp), True
    rows = {name: (n, lambda name=name: one_fault(name, rng.randint(1, 7), data, tmp)) for name in faults(data)}
    rows |= {"a rank is killed under torchrun": (1, lambda: torchrun_kill(data, tmp)), "another process in the directory": (1, lambda: second(data, tmp))}
    print(f"{'fault':34}{'tried':>6}  {'lost':14}message")
    for name, (times, f) in rows.items():
        if only not in name:
            continue
        try:
            said, lost = [f() for _ in range(times)][-1]
        except AssertionError as e:
            said, lost, ok = str(e), "FAULT", False
        print(f"{name:34}{times:6}  {lost:14}{said.replace(str(tmp), 'out')}", flush=True)
    return ok

# -----------------------------------------------------------------------------
# fuzz

NUMBERS = ["0", "1", "2", "3", "8", "64", "-1", "1.5", "1e3", "1e-3", "nan", "inf", "1e30", "-0", "ten", "", "None", "true", "1e18", "999999999999", "16", "96", "512"]
WORDS = ["", "true", "False", "maybe", "auto", "on", "cpu", "float32", "muon", "run", "-", ".", "..", "a/b", "a b", "$(touch pwned)", "\u00e9", "'", "x" * 300, "nano", "nowhere"]

class Hang(BaseException):
    """More than PATIENCE seconds; no handler of the program takes it for its own."""

@contextlib.contextmanager
def bounded():
    def ring(*_):
        raise Hang
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

def outcome(f):
    # "works", "refused" in one line with exit status 1 or 2, "diverged"; anything else is a fault, said in words
    out, err, status = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO()), None
    try:
        with bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = f()
    except SystemExit as e:
        status = e.code
    except Hang:
        return "hang"
    except BaseException as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return f"{type(e).__name__} in {Path(where.filename).name}:{where.lineno}: {str(e)[:150]}"
    err.seek(0)
    said = [line for line in err.read().splitlines() if not line.startswith("note: ")]
    if status in (None, 0):
        return "works"
    if status in (1, 2) and len(said) == 1 and said[0].startswith("error: ") and len(said[0]) < 1500:
        return "refused"
    return "diverged" if status == 3 else f"exit {status}: {said[:3]}"

def random_flags(rng, data):
    # a line of flags: most of it sensible, so that many lines get far
    model = rng.choice(NAMES + ["preln", "nothing"])
    fields = {**vars(train.parse([f"--model={model}"])[0])} if model in NAMES else {}
    line = dict(model=model, n_layer=rng.choice((1, 2, 3, 12)), n_embd=rng.choice((16, 64, 96)), n_head=rng.choice((1, 2, 4)), block_size=rng.choice((8, 64)), batch_tokens=1024)
    for key in rng.sample([*fields, "lerning_rate", "n_streams", "n_lay"], rng.choice((0, 1, 1, 2, 3, 6)) if fields else 1):
        kind = type(fields.get(key))
        line[key] = rng.choice((True, "false", "maybe")) if kind is bool else rng.choice(NUMBERS) if kind in (int, float) or rng.random() < 0.1 else rng.choice([*WORDS, data])
    line.pop("dry_run", None)
    flags = [rng.choice((f"--{k}={v}", f"--{k} {shlex.quote(str(v))}")) if v is not True else f"--{k}" for k, v in line.items()]
    if rng.random() < 0.05: # a stray word, the same flag again, a lost end
        flags.insert(rng.randrange(len(flags)), rng.choice(("stray", "--seed=1", "--n_layer=2", "--", "-", "=", "--help")))
    return " ".join(flags)

def dry(line):
    # one line through --dry_run -, as the sweep does it
    with mock.patch("sys.stdin", io.StringIO(line + "\n")):
        status = train.main(["--dry_run", "-"])
    text = sys.stdout.detach().getvalue().decode()
    sys.stdout = io.TextIOWrapper(io.BytesIO()) # detached
    if text.startswith("{"):
        said = json.loads(text)
        if "error" in said:
            print(said["error"], file=sys.stderr)
    return status

def fuzz_flags(n, seed, tmp):
    counts, failed, data = {}, [], str(warm(tmp))
    for i in tqdm(range(n), desc="flags", disable=None):
        line = random_flags(random.Random(f"{seed} {i}"), data)
        what = outcome(lambda: dry(line))
        counts[what if what in ("works", "refused") else "fault"] = counts.get(what if what in ("works", "refused") else "fault", 0) + 1
        if what not in ("works", "refused"):
            failed.append((i, line, what))
            tqdm.write(f"  case {failed[-1]}")
    return counts, failed

# damaged files: the bytes, or one value of what they hold

VALUES = [None, True, -1, 0, 1.5, 10**30, math.nan, "", "x", "../../x", "/etc/passwd", [], [1], {}, {"a": 1}, "neox:/etc/passwd"]

def spoil_bytes(rng, raw):
    i, k = rng.randrange(len(raw) + 1), rng.choice((1, 2, 16, 300))
    noise = bytes(rng.randrange(256) for _ in range(k))
    return rng.choice((b"", noise, raw[:i], raw[i:], raw[:i] + noise + raw[i:], raw[:i] + noise + raw[i + k:], raw[:i] + raw[i + k:], raw + raw))

def spoil_value(rng, value):
    # a copy with one value, anywhere inside, removed or replaced
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return rng.choice([*VALUES, torch.zeros(2)])
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, copy = rng.choice(keys), value.copy()
    if rng.random() < 0.2:
        del copy[key]
    else:
        copy[key] = spoil_value(rng, value[key])
    return copy

def spoil_file(rng, path):
    if path.suffix in (".json", ".pt") and rng.random() < 0.6:
        if path.suffix == ".pt":
            return torch.save(spoil_value(rng, torch.load(path, weights_only=True)), path)
        return path.write_text(json.dumps(spoil_value(rng, json.loads(path.read_text())), default=lambda t: t.tolist()))
    path.write_bytes(spoil_bytes(rng, path.read_bytes()))

def users(tmp):
    # every program that reads these files, {name: (the files it reads, what it does)}
    analyze, evaluate, sample, prepare = (importlib.import_module(m) for m in ("analyze", "evaluate", "sample", "prepare_fineweb"))
    (tmp / "tasks.jsonl").write_text('{"prompt": "a", "target": "b"}\n')
    (tmp / "text.txt").write_text("".join(f"line {i}\n" for i in range(400)))
    data, r = tmp / "bytes", tmp / "out" / "r"
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        prepare.main(["--source", str(tmp / "text.txt"), "--tokenizer", "bytes", "--out_dir", str(data)])
    flags = dict(data=data, out_dir=tmp / "out", run_name="r", vocab_size=None, steps=4, save_every=2, eval_every=2, batch_tokens=64, micro_batch=None)
    run_files, shards = [r / name for name in ("config.json", "result.json", "ckpt.pt", "log.jsonl")], [data / name for name in ("meta.json", "train_000000.bin", "val_000000.bin")]
    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        return clip(*_)
    clip = torch.nn.utils.clip_grad_norm_
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())), contextlib.redirect_stderr(io.TextIOWrapper(io.BytesIO())), mock.patch("torch.nn.utils.clip_grad_norm_", stop):
        assert train.main(argv(**flags)) == 143 # at step 1
    (r / "result.json").write_text(json.dumps(dict(status="diverged", step=1, val_loss=None)))
    return {
        "train": (shards, lambda: train.main(argv(**{**flags, "run_name": "new", "steps": 1}))),
        "resume": ([f for f in run_files if f.name != "result.json"] + shards, lambda: ((r / "result.json").unlink(), train.main(argv(**flags, resume=True)))[1]),
        "again": (run_files, lambda: train.main(argv(**flags))),
        "table": (run_files, lambda: analyze.main(["table", str(r), "--out_dir", str(tmp / "figures")])),
        "curves": (run_files, lambda: analyze.main(["curves", str(r), "--out_dir", str(tmp / "figures")])),
        "variance": ([r / "ckpt.pt", *shards], lambda: analyze.main(["variance", str(r), "--out_dir", str(tmp / "figures"), "--samples", "2"])),
        "norms": ([r / "ckpt.pt"], lambda: analyze.main(["norms", str(r / "ckpt.pt"), "--out_dir", str(tmp / "figures")])),
        "sample": ([r / "ckpt.pt"], lambda: sample.main([str(r), "--max_new_tokens", "2"])),
        "evaluate": ([r / "ckpt.pt", tmp / "tasks.jsonl"], lambda: evaluate.main([str(r), "--task", str(tmp / "tasks.jsonl"), "--device", "cpu"])),
        "prepare": ([data / "meta.json"], lambda: prepare.main(["--source", str(tmp / "text.txt"), "--tokenizer", "bytes", "--out_dir", str(data)]))}

def fuzz_files(n, seed, tmp):
    warm(tmp)
    counts, failed, programs = {}, [], users(tmp)
    kept = {path: path.read_bytes() for files, _ in programs.values() for path in files}
    before = {p for p in tmp.rglob("*")}
    for i in tqdm(range(n), desc="files", disable=None):
        rng = random.Random(f"{seed} {i}")
        name = rng.choice(list(programs))
        path = rng.choice(programs[name][0])
        spoil_file(rng, path)
        with mock.patch("time.sleep"):
            what = outcome(programs[name][1])
        good = what in ("works", "refused", "diverged")
        counts[what if good else "fault"] = counts.get(what if good else "fault", 0) + 1
        if not good:
            failed.append((i, f"{name} with a damaged {path.name}", what))
            tqdm.write(f"  case {failed[-1]}")
        shutil.rmtree(tmp / "out" / "new", ignore_errors=True), shutil.rmtree(tmp / "figures", ignore_errors=True)
        for path, raw in kept.items():
            path.write_bytes(raw)
    stray = {p for p in tmp.rglob("*")} - before - {tmp / "out" / "r" / "lock"}
    if stray:
        print("  written outside:", *stray)
    return counts, failed + [*stray]

def fuzz(n, seed, tmp, only=""):
    ok = True
    for name, f, m in (("flags", fuzz_flags, n), ("files", fuzz_files, n // 10)):
        if only not in ("", name):
            continue
        began = time.monotonic()
        (tmp / name).mkdir()
        counts, failed = f(m, seed, tmp / name)
        print(f"{name}: {m} tried in {time.monotonic() - began:.0f} s: " + ", ".join(f"{v} {k}" for k, v in sorted(counts.items())))
        ok &= not failed
    return ok

# -----------------------------------------------------------------------------
# numerics

WAYS = { # name: (flags, processes, tolerance of the training loss in any of the 50 steps, in nats)
    "bfloat16": (dict(dtype="bfloat16"), 1, 0.03), "fused": (dict(fused="on"), 1, 1e-4), "two processes": ({}, 2, 1e-4), "compiled": (dict(compile=True), 1, 1e-4)}

def numerics(tmp, only, seed):
    # the same 50 steps of every design in every way against eager FP32 on one process; compiled: one design of each file, or --only
    importlib.import_module("kernels")
    data, ok = warm(tmp), True
    first = list({path: name for name, (path, _) in reversed(train.find_models().items())}.values())
    print(f"{'largest difference of a loss':28}" + "".join(f"{way:>16}" for way in WAYS))
    print(f"{'tolerance':28}" + "".join(f"{tolerance:16.0e}" for *_, tolerance in WAYS.values()), flush=True)
    for name in [n for n in NAMES if only in ("", n)]:
        losses, flags = {}, dict(data=data, out_dir=tmp, model=name, steps=50, n_layer=4, n_embd=32, micro_batch=4, seed=seed, grad_clip=1, learning_rate=2e-3) # one rate for all: at four times that, rounding errors grow
        for way, (own, world, _) in {"eager": ({}, 1, 0), **WAYS}.items():
            if way == "compiled" and not (only or name in first):
                continue
            ends = [wait(p, 600) for p in start_all(argv(**{**flags, **own}, run_name=f"{name} {way}"), [contextlib.nullcontext] * world, tmp / "err")]
            assert set(ends) == {0} or way == "fused" and ends == [1] and "--fused" in (tmp / "err.0").read_text(), (name, way, (tmp / "err.0").read_text())
            losses[way] = np.array([x.get("loss", x.get("val_loss")) for x in log(tmp / f"{name} {way}")]) if not any(ends) else None
        worst = {way: np.abs(v - losses["eager"]).max() for way, v in losses.items() if v is not None}
        ok &= all(worst[way] <= WAYS[way][2] for way in worst if way in WAYS)
        print(f"{name:28}" + "".join(f"{worst[way]:16.1e}" if way in worst else f"{'-':>16}" for way in WAYS), flush=True)
    return ok

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["kills", "matrix", "fuzz", "numerics"])
    p.add_argument("--n", type=int)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", default="")
    args = p.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        if args.what == "fuzz":
            return 0 if fuzz(args.n or 10000, args.seed, tmp, args.only) else 1
        if args.what == "matrix":
            return 0 if matrix(args.n or 3, args.seed, tmp, args.only) else 1
        if args.what == "numerics":
            return 0 if numerics(tmp, args.only, args.seed) else 1
        if args.what == "kills":
            print(kills(args.n or 100, args.seed, tmp))
            return 0

if __name__ == "__main__":
    sys.exit(main())
