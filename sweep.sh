#!/usr/bin/env bash
# Suites of runs, shapes x learning rates x models x seeds: starts what is not done yet, prints the table, names what failed.
#
#   ./sweep.sh nano                      # the scaled-down DepthBench, for two CPU cores
#   ./sweep.sh depthbench_400m --list    # its runs with parameters (ours and the paper's), tokens and FLOPs; starts nothing
#   MODELS="preln mine" SHAPES="12x768 24x544" LRS="1e-3 2e-3" SEEDS="0 1" ./sweep.sh custom --steps 500
#
# MODELS, SHAPES choose from the suite (a model it does not know runs wherever preln does), LRS, SEEDS replace its own: words, or lines where names hold spaces.
# JOBS=k: k runs at a time, each writing to <run>.log. NPROC=k: k processes per run, by torchrun; several nodes with one file system: PET_NNODES and so on.
# Further flags go to train.py and win over the suite's. Paths are relative to this folder.

read -rd '' suites <<'END'
# suite | models, :rates where not the line's; best: of the suite's | layers x width (x heads x d_ff) = the paper's parameters | rates | seeds | flags
# "name = flags" holds for all suites whose names begin so, "name ! text" explains their lists
depthbench       = --vocab_size 50280
depthbench       ! The paper rounds 406.5M to 407M and to 406M, 504.5M to 504M; its text lacks the row of 70x640 and the budget of the iso suite: the 400M suite's is used.
depthbench_400m  | preln sandwich lns:1e-2 deepnorm:1e-3 keel moda attnres attnres_block hc mhc | 16x1216=407M 20x1120=414M 24x1024=405M 28x960=406M 32x896=399M | 2e-3 | 0 | --steps 7600
depthbench_400m  | preln attnres hc | 42x800=404M 70x640 | 2e-3 | 0 | --steps 7600
depthbench_lr    | preln sandwich lns:2e-3,5e-3,1e-2,2e-2 deepnorm keel moda attnres hc mhc | 24x1024=405M | 5e-4,1e-3,2e-3,5e-3 | 0 | --steps 7600
depthbench_iso   | preln attnres hc | 16x1248=425M 24x1024=405M 32x896=399M 42x768=375M 70x608=373M 84x544=354M | 2e-3 | 0 | --steps 7600
depthbench_scale | preln attnres hc | 24x672=198M 18x768=205M 12x896=206M | 2e-3 | 0 | --steps 3800
depthbench_scale | preln attnres hc | 28x800=296M 21x896=293M 14x1056=294M | 2e-3 | 0 | --steps 5700
depthbench_scale | preln attnres hc | 32x896=399M 24x1024=405M 16x1216=406M | 2e-3 | 0 | --steps 7600
depthbench_scale | preln attnres hc | 34x992=502M 26x1120=504M 17x1344=504M | 2e-3 | 0 | --steps 9500
depthbench_1b    | preln attnres hc | 28x2048x16x6144=1.615B 40x1728x16x5184=1.607B 54x1504x16x4512=1.617B | 5e-4 | 0 | --steps 30400 --n_kv_head 8
layerrope        = --vocab_size 32000 --block_size 256 --batch_tokens 131072 --micro_batch 64 --weight_decay 0 --grad_clip 0 --beta2 0.999
layerrope        ! The paper has C4, LLaMA-2's tokenizer, padded documents, embedding std .632, BF16 weights, another DeepNet, and in depth two seeds up to 384 blocks.
layerrope_ladder = --tokens_per_param 80
layerrope_ladder | preln:1.6e-2 postln:2e-3 sandwich:3.2e-2 lns:1.6e-2 layerrope:6.4e-2 layerrope_peri:6.4e-2 | 8x512x8x1376=58.1M | | 0 |
layerrope_ladder | preln:8e-3 postln:2e-3 sandwich:8e-3 lns:1.6e-2 layerrope:3.2e-2 layerrope_peri:3.2e-2 | 12x768x12x2048=134.1M | | 0 |
layerrope_ladder | preln:8e-3 postln:1e-3 sandwich:1.6e-2 lns:1.6e-2 layerrope:6.4e-2 layerrope_peri:3.2e-2 | 20x896x14x2389=250.0M | | 0 |
layerrope_ladder | preln:4e-3 postln:6.25e-5 sandwich:1.6e-2 lns:8e-3 layerrope:3.2e-2 layerrope_peri:8e-3 | 24x1280x20x3413=553.8M | | 0 |
layerrope_ladder | preln:2e-3 postln:3.125e-5 sandwich:8e-3 lns:8e-3 layerrope:3.2e-2 layerrope_peri:4e-3 | 24x2048x32x5461=1.34B | | 0 |
layerrope_depth  = --steps 20000 --n_head 2 --d_ff 352
layerrope_depth  | preln postln sandwich lns deepnorm | 48x128=17.8M 96x128 192x128 256x128 384x128 512x128=111.1M | 1e-3 | 0 |
layerrope_depth  | layerrope | 48x128=17.8M 96x128 192x128 256x128 384x128 512x128=111.1M | 1e-3 | 0 | --depth_slope 0 --depth_rot_slope 0 --depth_rope_base 10000
mgr              = --block_size 1024 --batch_tokens 524288 --steps 20000 --warmup_frac 0.01 --optimizer muon
mgr              ! The paper ties the head to the embedding: ours less V d is 123.6M, 353.9M, 773.7M. It gives no rates: 6e-4 is nanoGPT's, 0.02 Muon's own.
mgr              | preln attnres attnres_block mhc_lite mgr mgr_independent | 12x768x12=0.12B 24x1024x16=0.35B | 6e-4 | 0 |
mgr              | preln attnres attnres_block mgr mgr_independent | 36x1280x20=0.77B | 6e-4 | 0 |
mgr              | mgr mgr_independent | 12x768x12=0.12B 24x1024x16=0.35B 36x1280x20=0.77B | 6e-4 | 0 | --n_streams 8
nano             = --data data/stdlib --vocab_size 320 --block_size 256 --n_head 4 --batch_tokens 4096 --steps 250 --eval_tokens 131072 --eval_every 125 --save_every 125 --device cpu --fused off
nano             ! Pre-LN parameters within 4.4 % of those at 4x64 (242,240), 4 tokens per parameter (the paper: 2.2 %, 20). Up to 4x64 attnres_block is attnres.
nano             | preln sandwich lns:3e-3,1e-2,3e-2 deepnorm keel moda attnres hc mhc layerrope:3e-3,1e-2,3e-2 mgr | 4x64 | 1e-3,3e-3,1e-2 | 0 |
nano             | attnres_block | 8x48 | 1e-3,3e-3,1e-2 | 0 |
nano             | preln sandwich lns deepnorm keel moda attnres hc mhc layerrope mgr | 2x88 8x48 16x32 | best | 0 |
nano             | attnres_block | 16x32 | best | 0 |
nano             | preln hc attnres | 32x24 | best | 0 |
nano             | preln hc attnres | 2x88 16x32 | best | 1 2 |
custom           | preln | 24x1024 | 2e-3 | 0 |
END
[[ $# -gt 0 && $1 != -h && $1 != --help ]] || { sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; }
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null || exit
[[ $1 != nano || -f data/stdlib/meta.json || " $* " == *" --list "* ]] || "${PYTHON:-python}" prepare_fineweb.py --source stdlib --out_dir data/stdlib || exit
[[ $1 != nano ]] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} JOBS=${JOBS:-2}
suites=$suites exec "${PYTHON:-python}" - "$@" <<'END'
import itertools, json, os, shlex, signal, subprocess, sys, time

ENDED = ("finished", "diverged")
suite, extra, environ = sys.argv[1], [w for w in sys.argv[2:] if w != "--list"], os.environ
lines = [x for x in environ["suites"].splitlines() if x[0] != "#"]
rows = [[c.strip() for c in x.split("|")] for x in lines if "|" in x]
mine = [r for r in rows if r[0] == suite] or sys.exit(f"error: {suite}: not one of {', '.join(dict.fromkeys(r[0] for r in rows))}")
about = lambda sign: [x.split(sign)[1] for x in lines if sign in x and suite.startswith(x.split()[0])]
words = lambda text: text.splitlines() if "\n" in text else text.split() # nothing in them is evaluated
MODELS, SHAPES, LRS, SEEDS = (words(environ.get(k, "")) for k in ("MODELS", "SHAPES", "LRS", "SEEDS"))
JOBS, NPROC = (int(w) if (w := environ.get(k) or "0").isdigit() else sys.exit(f"error: {k}: {w} is not a number") for k in ("JOBS", "NPROC"))
new = [m for m in MODELS if not any(m == w.split(":")[0] for r in mine for w in r[1].split())]
given, lengths = {w.split("=")[0] for w in extra}, {"--steps", "--tokens", "--tokens_per_param"}
given |= lengths if given & lengths else set() # one excludes the others
dry = subprocess.Popen([sys.executable, "train.py", "--dry_run", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)
running, how, stopped = {}, {}, 0 # process -> run; name -> how it ended; the exit status after a signal

def say(text):
    try:
        print(text, flush=True)
    except BrokenPipeError: # the reader has gone, the runs go on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

def ask(flags): # what train.py makes of them
    dry.stdin.write(shlex.join(flags).replace("\n", " ") + "\n")
    return json.loads(dry.stdout.readline() or sys.exit("error: train.py --dry_run - ended early"))

def best(tried): # the rate with the lowest loss, once all that the suite tries have ended
    done = [(json.load(open(f"{r['path']}/result.json"))["val_loss"], r["rate"]) for r in tried if r["state"] == "finished"]
    return min(done)[1] if done and all(r["state"] in ENDED for r in tried) else None

def plan(): # -> the runs by name
    runs, tried = {}, {} # tried: by model, those at the rates that the suite names
    for _, models, shapes, rates, seeds, own in mine:
        own = shlex.split(" ".join([*about(" = "), own, "--out_dir", "out/" + suite.split("_")[0]]))
        models = [(w + ":" + rates).split(":")[:2] for w in models.split()]
        models += [(m, lrs) for w, lrs in models if w == "preln" for m in new]
        shapes = SHAPES if suite == "custom" and SHAPES else shapes.split()
        for (model, lrs), shape, seed in itertools.product(models, shapes, SEEDS or seeds.split()):
            for lr in (LRS or lrs.split(",")) if not MODELS or model in MODELS else ():
                (size, _, paper), rate = shape.partition("="), best(tried[model]) if lr == "best" else lr
                L, d, *more = f"{size}x".split("x") # more: heads, d_ff
                name = f"{model}-L{L}-d{d}-lr{rate or lr}-s{seed}" + "".join(f"-n{n}" for k, n in zip(own, own[1:]) if k == "--n_streams")
                pairs = dict([*zip(own[::2], own[1::2]), *zip(("--n_head", "--d_ff"), filter(None, more))])
                flags = [w for k, v in pairs.items() if k not in given for w in (k, v)] + (["--learning_rate", rate] if rate else [])
                flags += ["--model", model, "--n_layer", L, "--n_embd", d, "--seed", seed, "--run_name", name, *extra]
                r = ask(flags) | dict(name=name, rate=rate, flags=flags, paper=paper)
                r["path"], r["state"] = f"{r.get('out_dir')}/{name}", r.get("error") or (r["status"] or "new" if rate else "waits for the rates to be tried")
                T = 1 + (r["flops_forward"] - r["flops_prefill"]) // r["n_params_embedding"] if "error" not in r else 1 # prefill: head at one position
                r["cost"] = 3 * r.get("flops_forward", 0) * r.get("tokens", 0) // T # the backward pass is twice the forward
                if lr != "best":
                    tried.setdefault(model, []).append(r)
                if not SHAPES or size in SHAPES or f"{L}x{d}" in SHAPES:
                    runs.setdefault(name, r)
    return runs or sys.exit(f"error: MODELS, SHAPES: leave nothing of {suite}")

def stop(sig, _): # what runs gets the signal and saves, nothing more is started
    global stopped
    stopped = 128 + sig
    for p in running:
        p.send_signal(signal.SIGTERM if sig == signal.SIGHUP else sig)

def start(r):
    say(f"start {r['name']}")
    os.makedirs(r["out_dir"], exist_ok=True)
    log = open(r["path"] + ".log", "a") if JOBS > 1 else None
    torchrun = ["-m", "torch.distributed.run", *["--standalone"] * ("PET_NNODES" not in environ), "--nproc_per_node", str(NPROC)]
    command = [sys.executable, *torchrun * (NPROC > 0), "train.py", *r["flags"], *["--resume"] * (r["state"] == "unfinished")]
    running[subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)] = r # a signal comes by stop alone

def drain(most): # waits until at most so many runs are left
    while len(running) > most:
        time.sleep(0.1)
        for p in [p for p in running if p.poll() is not None]:
            how[name := running.pop(p)["name"]] = f"exit {p.returncode}" if p.returncode >= 0 else signal.Signals(-p.returncode).name
            say(f"ended {name}, {how[name]}")

runs = plan()
if "--list" in sys.argv:
    print(f"{'run':38}{'parameters':>14}{'of depth':>12}{'without':>12}{'paper':>9}{'steps':>9}{'tokens':>17}{'FLOPs':>9}  state")
    row = "{n_params:14,}{n_params_depth:+12,}{0:11,.2f}M{paper:>9}{steps:9,}{tokens:17,}{cost:9.1e}  "
    for r in runs.values():
        print(f"{r['name']:38}{row.format((r['n_params'] - r['n_params_depth']) / 1e6, **r) if 'n_params' in r else ''}{r['state']}")
    print(f"{len(runs)} runs, {sum(r['cost'] for r in runs.values()):.1e} FLOPs", *about(" ! "), sep="\n")
    sys.exit()
for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.getsignal(s) == signal.SIG_IGN or signal.signal(s, stop) # ignored: under nohup
while todo := [r for r in runs.values() if r["state"] in ("new", "unfinished") and r["name"] not in how and not stopped]:
    for r in sorted(todo, key=lambda r: r["cost"]): # cheapest first
        drain(max(JOBS, 1) - 1)
        if not stopped:
            start(r)
    drain(0)
    runs = runs if stopped else plan() # now the best rates may be known
if stopped:
    sys.exit(say("stopped; the same command continues") or stopped)
table = ["analyze.py", "table", *(r["path"] for r in runs.values() if r["state"] in ENDED)]
failed = [f"{r['name']}: {how.get(r['name'], r['state'])}" for r in runs.values() if r["state"] not in ENDED]
say(shlex.join(["python", *table]))
if len(table) > 2 and subprocess.run([sys.executable, *table]).returncode:
    failed.append("analyze.py table")
say("\n".join(f"failed: {f}" for f in failed) or f"all {len(runs)} runs have ended")
sys.exit(len(failed) > 0)
END
