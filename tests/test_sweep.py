"""
sweep.sh against a train.py that pretends: what is started, skipped, resumed and named, with which words, and what a signal does.
One case lists real models. Run: python -m pytest tests/test_sweep.py
"""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

STUB = r'''
import json, os, shlex, signal, sys, time

def parse(argv):
    flags = {}
    while argv:
        key, eq, value = argv.pop(0).partition("=")
        if key in flags:
            raise ValueError(f"error: {key}: given twice")
        flags[key] = value if eq else argv.pop(0) if argv and not argv[0].startswith("--") else True
    return flags

def status(f):
    path = os.path.join(f["--out_dir"], f["--run_name"])
    old = json.load(open(path + "/config.json")) if os.path.exists(path + "/config.json") else None
    if old != {k: v for k, v in f.items() if k != "--resume"}:
        return None
    return json.load(open(path + "/result.json"))["status"] if os.path.exists(path + "/result.json") else "unfinished"

if sys.argv[1:] == ["--dry_run", "-"]:
    for line in sys.stdin:
        try:
            f = parse(shlex.split(line))
            if f["--model"] == "unknown":
                raise ValueError("error: --model: unknown is not one of these")
            n = 12 * int(f["--n_layer"]) * int(f["--n_embd"]) ** 2
            print(json.dumps(dict(n_params=n, n_params_depth=0, flops_forward=2 * n * 8, flops_prefill=2 * n * 8 - 7, n_params_embedding=1, steps=10, tokens=800, out_dir=f["--out_dir"], status=status(f))), flush=True)
        except ValueError as e:
            print(json.dumps(dict(error=str(e))), flush=True)
    sys.exit()

f = parse(sys.argv[1:])
path, model = os.path.join(f["--out_dir"], f["--run_name"]), f["--model"]
note = lambda what: open("events.jsonl", "a").write(json.dumps(dict(what=what, run=f["--run_name"], argv=sys.argv[1:], t=time.time(), world=os.environ.get("WORLD_SIZE"))) + "\n")
signal.signal(signal.SIGINT, lambda s, _: (note("signal"), sys.exit(130)))
signal.signal(signal.SIGTERM, lambda s, _: (note("signal"), sys.exit(143)))
os.makedirs(path, exist_ok=True)
json.dump({k: v for k, v in f.items() if k != "--resume"}, open(path + "/config.json", "w"))
note("start")
print("in", model)
if model == "slow" and not os.path.exists("quick"):
    time.sleep(5)
time.sleep(0.2 if model == "nap" else 0)
note("end")
if model == "crash":
    raise SystemExit(1)
if model == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if model != "silent": # the loss is lowest at 3e-3
    loss = abs(float(f["--learning_rate"]) - 3e-3)
    json.dump(dict(status="diverged" if model == "wild" else "finished", val_loss=None if model == "wild" else loss), open(path + "/result.json", "w"))
sys.exit(3 if model == "wild" else 0)
'''
ANALYZE = "import json, sys; print('TABLE', json.dumps(sys.argv[1:]))"
TORCHRUN = '''
import os, subprocess, sys
i = sys.argv.index("--nproc_per_node")
print("TORCHRUN", *sys.argv[1:i + 2])
sys.exit(subprocess.run([sys.executable, *sys.argv[i + 2:]], env=dict(os.environ, WORLD_SIZE=sys.argv[i + 1])).returncode)
'''

class Repo:
    """A folder with sweep.sh and stand-ins for the scripts that it calls."""

    def __init__(self, tmp, *edits):
        self.path = tmp / "my repo's $(touch pwned)"
        (self.path / "torch/distributed").mkdir(parents=True)
        text = (ROOT / "sweep.sh").read_text()
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        for name, body in {"sweep.sh": text, "train.py": STUB, "analyze.py": ANALYZE, "torch/distributed/run.py": TORCHRUN, "torch/__init__.py": "",
                           "torch/distributed/__init__.py": "", "prepare_fineweb.py": ""}.items():
            (self.path / name).write_text(body)
        self.cwd = tmp

    def popen(self, *args, **env):
        clean = {k: v for k, v in os.environ.items() if k not in ("MODELS", "SHAPES", "LRS", "SEEDS", "JOBS", "NPROC", "PET_NNODES")}
        return subprocess.Popen(["bash", str(self.path / "sweep.sh"), *args], cwd=self.cwd, env={**clean, "PYTHON": sys.executable, **env}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) # ignored where pytest itself runs in the background

    def sweep(self, *args, **env):
        # -> exit status, output, the runs that were started
        before = len(self.events())
        p = self.popen(*args, **env)
        out = p.communicate(timeout=60)[0]
        assert "Traceback" not in out, out
        return p.returncode, out, [e["run"] for e in self.events()[before:] if e["what"] == "start"]

    def events(self):
        log = self.path / "events.jsonl"
        return [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else []

failures = lambda out: re.findall(r"^failed: ([^:]*)", out, re.M)

# ---- skipping, and going on after a failure

def check_skip(repo):
    env = dict(MODELS="preln wild", SHAPES="2x8 4x8", LRS="1e-3", SEEDS="0 1")
    code, out, ran = repo.sweep("custom", **env)
    assert code == 0 and len(ran) == len(set(ran)) == 8
    assert ran[-4:] == [r for r in ran if "L4" in r] # cheapest first
    assert len(json.loads(out.split("TABLE ")[1].splitlines()[0])) == 9 and failures(out) == [] # the diverged ones are results
    code, out, ran = repo.sweep("custom", **env)
    assert code == 0 and ran == [], "finished runs are skipped"
    (repo.path / "out/custom/preln-L2-d8-lr1e-3-s1/result.json").unlink()
    code, out, ran = repo.sweep("custom", **env)
    assert ran == ["preln-L2-d8-lr1e-3-s1"], "a run whose result was deleted is done again"
    code, out, ran = repo.sweep("custom", "--steps", "5", **env)
    assert len(ran) == 8, "another config is not mistaken for done"

def check_failures(repo):
    env = dict(MODELS="killed nap silent wild crash unknown", SHAPES="2x8", LRS="1e-3")
    bad = {f"{m}-L2-d8-lr1e-3-s0" for m in ("killed", "silent", "crash", "unknown")}
    for jobs in "13":
        code, out, ran = repo.sweep("custom", JOBS=jobs, **env)
        assert code == 1 and set(failures(out)) == bad, out
        assert "SIGKILL" in out and "exit 1" in out and "unknown is not one of these" in out
    assert ran and {r.split("-")[0] for r in ran} == {"killed", "silent", "crash"}, "only what failed is tried again"
    piped = subprocess.run(["bash", "-c", 'set -o pipefail; bash "$0" custom | cat', str(repo.path / "sweep.sh")], capture_output=True, text=True,
                           env={**os.environ, "PYTHON": sys.executable, **env}, cwd=repo.cwd, timeout=60)
    assert piped.returncode == 1 and set(failures(piped.stdout)) == bad

def check_signal(repo, sig=signal.SIGINT, code=130):
    p = repo.popen("custom", MODELS="slow", SHAPES="2x8", LRS="1e-3", SEEDS="0 1 2", JOBS="2")
    deadline = time.time() + 20
    while len(repo.events()) < 2 and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(0.2) # the handlers of the last one
    os.killpg(p.pid, sig) # as the terminal does
    out = p.communicate(timeout=20)[0]
    what = [e["what"] for e in repo.events()]
    assert p.returncode == code and "Traceback" not in out, out
    assert what.count("signal") == 2 and what.count("start") == 2, "each run is told once, and the third is not started"
    (repo.path / "quick").touch()
    repo.sweep("custom", MODELS="slow", SHAPES="2x8", LRS="1e-3", SEEDS="0 1 2", JOBS="2")
    resumed = [e["run"] for e in repo.events() if "--resume" in e["argv"] and e["what"] == "start"]
    assert sorted(resumed) == ["slow-L2-d8-lr1e-3-s0", "slow-L2-d8-lr1e-3-s1"], "what was interrupted is resumed"

def check_jobs(repo):
    repo.sweep("custom", MODELS="nap", SHAPES="2x8", LRS="1e-3", SEEDS="0 1 2 3", JOBS="2")
    together, most = 0, 0
    for e in sorted(repo.events(), key=lambda e: e["t"]):
        together += {"start": 1, "end": -1}[e["what"]]
        most = max(most, together)
    assert most == 2
    assert "in nap" in (repo.path / "out/custom/nap-L2-d8-lr1e-3-s3.log").read_text()

def check_best(repo):
    code, out, ran = repo.sweep("nano", MODELS="preln attnres_block mine")
    rates = {r for r in ran if "-L4-" in r and not r.startswith("attnres_block")}
    assert code == 0 and len(ran) == len(set(ran)) == 6 + 3 + 6 + 1 + 2 + 8, ran # rates, other shapes, L = 32, seeds
    assert rates == {f"{m}-L4-d64-lr{x}-s0" for m in ("preln", "mine") for x in ("1e-3", "3e-3", "1e-2")}
    assert all("lr3e-3" in r for r in set(ran) - rates if not r.startswith("attnres_block-L8")), "the other shapes run at the best rate"

@pytest.mark.parametrize("check", [check_skip, check_failures, check_signal, check_jobs, check_best])
def test_sweep(tmp_path, check):
    check(Repo(tmp_path))
    assert not list(tmp_path.rglob("pwned")), "a name was evaluated"

BROKEN = [ # an edit that breaks the script, and the check that has to notice
    (check_skip, ('r["state"] in ("new", "unfinished")', 'True')),
    (check_failures, ('for r in runs.values() if r["state"] not in ENDED]', 'for r in runs.values() if how.get(r["name"]) == "exit 1"]')),
    (check_signal, ("        if not stopped:\n", "        if True:\n")),
    (check_jobs, ("drain(max(JOBS, 1) - 1)", "drain(9)")),
    (check_best, ("min(done)", "max(done)"))]

@pytest.mark.parametrize("check,edit", BROKEN)
def test_broken_twin(tmp_path, check, edit):
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
        check(Repo(tmp_path, edit))

def test_terminate(tmp_path):
    check_signal(Repo(tmp_path), signal.SIGTERM, 143)

def test_waits_for_rates(tmp_path):
    # a rate that failed: the other shapes do not run at a rate that was never compared
    repo = Repo(tmp_path, ("preln sandwich lns:3e-3", "preln crash lns:3e-3"), ("preln sandwich lns deepnorm keel moda attnres hc mhc layerrope mgr | 2x88", "preln crash | 2x88"))
    code, out, ran = repo.sweep("nano", MODELS="crash")
    assert code == 1 and len(ran) == 3 and len(failures(out)) == 6 and out.count("waits for the rates") == 3

def test_names_and_flags(tmp_path):
    # words go to train.py as they are: spaces, quotes, $(...); a flag given by hand wins over the suite's
    repo = Repo(tmp_path)
    nasty = ["a b", "$(touch pwned)", "`touch pwned`", "q\"'uote", "; touch pwned", "*"]
    code, out, ran = repo.sweep("custom", "--out_dir", "o u t/$(touch pwned)", "--data=da ta/'x'", MODELS="\n".join(nasty), SHAPES="2x8", LRS="1e-3", JOBS="2")
    assert code == 0 and sorted(ran) == sorted(f"{m}-L2-d8-lr1e-3-s0" for m in nasty), out
    argv = next(e["argv"] for e in repo.events() if e["run"].startswith("a b"))
    assert argv[argv.index("--model") + 1] == "a b" and argv[argv.index("--out_dir") + 1] == "o u t/$(touch pwned)" and "--data=da ta/'x'" in argv
    assert not list(tmp_path.rglob("pwned"))
    code, out, ran = repo.sweep("depthbench_iso", "--tokens", "800", MODELS="preln", SHAPES="16x1248", LRS="7e-4")
    argv = next(e["argv"] for e in repo.events() if e["run"] == "preln-L16-d1248-lr7e-4-s0")
    assert code == 0 and len(ran) == 1 and "--steps" not in argv and argv[argv.index("--tokens") + 1] == "800"
    code, out, ran = repo.sweep("mgr", MODELS="mgr", SHAPES="12x768")
    assert sorted(ran) == ["mgr-L12-d768-lr6e-4-s0", "mgr-L12-d768-lr6e-4-s0-n8"]

def test_torchrun(tmp_path):
    repo = Repo(tmp_path)
    code, out, ran = repo.sweep("custom", MODELS="nap", SHAPES="2x8", NPROC="2")
    assert code == 0 and repo.events()[0]["world"] == "2" and "TORCHRUN --standalone --nproc_per_node 2" in out
    code, out, ran = repo.sweep("custom", MODELS="wild", SHAPES="2x8", NPROC="2", PET_NNODES="2")
    assert code == 0 and "TORCHRUN --nproc_per_node 2" in out # several nodes: torchrun's own variables say where

@pytest.mark.parametrize("args,env,words", [
    (["nanno"], {}, "nanno: not one of depthbench_400m"), (["nano"], dict(JOBS="two"), "JOBS: two is not a number"),
    (["nano"], dict(SHAPES="3x3"), "leave nothing of nano"), (["custom", "--model", "hc"], {}, "--model: given twice"), ([], {}, "./sweep.sh nano")])
def test_words_for_mistakes(tmp_path, args, env, words):
    code, out, ran = Repo(tmp_path).sweep(*args, **env)
    assert words in out and ran == [] and code == (1 if args else 0)

def test_list_of_real_models():
    # parameters to the unit, the paper's beside them (DepthBench, Table 9), steps, tokens and FLOPs; nothing is started
    p = subprocess.run(["bash", str(ROOT / "sweep.sh"), "depthbench_1b", "--list"], capture_output=True, text=True, timeout=120,
                       env={**os.environ, "PYTHON": sys.executable, "MODELS": "preln"})
    assert p.returncode == 0 and "The paper" in p.stdout, p.stderr
    T, V = 2048, 50280
    for L, d, n, paper in ((28, 2048, "1,615,349,760", "1,615.35M +1.615B"), (40, 1728, "1,607,179,968", "1,607.18M +1.607B"), (54, 1504, "1,617,192,544", "1,617.19M +1.617B")):
        flops = 3 * 30400 * 512 * (L * (4 * T * d * d + 2 * T * d * d + 6 * T * d * 3 * d + 2 * T * T * d) + 2 * T * d * V)
        assert re.search(rf"^preln-L{L}-d{d}-lr5e-4-s0 +{n} +\+0 +{paper} +30,400 +31,876,710,400 +{re.escape(f'{flops:.1e}')} ", p.stdout, re.M), p.stdout
