"""
Teacher-forced negative log-likelihood and multiple-choice accuracy of checkpoints.

    python evaluate.py out/my_run --task all                       # the tasks below, through `datasets`
    python evaluate.py out/run1 out/run2 --task arc_easy,my.jsonl  # lines {"prompt", "target"} or {"prompt", "choices", "answer"}

Zero-shot; the loss is on the completion alone (DepthBench, Figure 4): summed over a data set, divided by its tokens, and by its
bytes, which compare across tokenizers. acc and acc_norm as in lm-evaluation-harness. Prints one JSON object.
"""
import argparse
import hashlib
import json
import random
import re
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from prepare_fineweb import get_tokenizer, load_dataset
from train import fail, load_checkpoint, own_tokenizer

# -----------------------------------------------------------------------------
# Tasks: a row of the data set -> (prompt, target), or (prompt, choices, index of the right one)

def mbpp(r):
    tests = "\n".join(r["test_list"][:3])
    return f"You are an expert Python programmer, and here is your task: {r['text']} Your code should pass these tests:\n\n{tests}\n[BEGIN]\n", r["code"] + "\n"

def humaneval(r):
    return r["prompt"], r["canonical_solution"]

def sciq(r):
    return f"Question: {r['question']}\nAnswer:", f"{r['correct_answer']}\nExplanation: {r['support']}"

def gpqa(r): # layout of the choices: guess
    choices = [r["Correct Answer"].strip(), *(r[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
    random.Random(int(hashlib.sha256(r["Record ID"].encode()).hexdigest(), 16)).shuffle(choices)
    lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices))
    return f"Question: {r['Question'].strip()}\n{lines}\nAnswer:", f"{r['Correct Answer'].strip()}\nExplanation: {r['Explanation'].strip()}"

def gsm8k(r):
    return f"Question: {r['question']}\nAnswer:", r["answer"]

def math500(r):
    return f"Problem:\n{r['problem']}\n\nSolution:", r["solution"]

def arc_easy(r):
    return f"Question: {r['question']}\nAnswer:", r["choices"]["text"], r["choices"]["label"].index(r["answerKey"])

def hellaswag(r):
    tidy = lambda s: re.sub(r"\[.*?\]", "", s.strip().replace(" [title]", ". ")).replace("  ", " ")
    return tidy(f"{r['activity_label']}: {r['ctx_a']} {r['ctx_b'].capitalize()}"), [tidy(e) for e in r["endings"]], int(r["label"])

def piqa(r):
    return f"Question: {r['goal']}\nAnswer:", [r["sol1"], r["sol2"]], r["label"]

TASKS = { # name -> data set on the hub, configuration, split, function of a row
    "mbpp": ("google-research-datasets/mbpp", "full", "test", mbpp),
    "humaneval": ("openai/openai_humaneval", None, "test", humaneval),
    "sciq": ("allenai/sciq", None, "test", sciq),
    "gpqa": ("Idavidrein/gpqa", "gpqa_diamond", "train", gpqa),
    "gsm8k": ("openai/gsm8k", "main", "test", gsm8k),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", math500),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test", arc_easy),
    "hellaswag": ("Rowan/hellaswag", None, "validation", hellaswag),
    "piqa": ("baber/piqa", None, "validation", piqa),
}
CATEGORIES = {"coding": ("mbpp", "humaneval"), "stem": ("sciq", "gpqa"), "math": ("gsm8k", "math500")}

def read_task(task):
    # name or JSONL file -> its examples, tuples as above
    if task in TASKS:
        path, config, split, example = TASKS[task]
        try:
            return [example(r) for r in load_dataset(path, config, split=split)]
        except Exception as e:
            fail(f"--task: {task}: {path} cannot be had ({type(e).__name__}: {' '.join(str(e).split())[:160]}); without a network, "
                 f"HF_HUB_OFFLINE=1 uses a copy in the cache; or name a JSONL file, or other tasks of {','.join(TASKS)}")
    examples = []
    try:
        for n, line in enumerate(Path(task).read_text(encoding="utf-8-sig").split("\n"), 1):
            if line.strip():
                r = json.loads(line)
                targets = r["choices"] if "choices" in r else [r["target"]]
                "".join([r["prompt"], *targets]) # all are text, or TypeError
                examples.append((r["prompt"], targets, range(len(targets))[r["answer"]]) if "choices" in r else (r["prompt"], *targets))
                if len(examples[-1]) != len(examples[0]):
                    raise ValueError("unlike the lines before it")
    except UnicodeDecodeError as e:
        fail(f"{task}: is not UTF-8 ({e.reason} at byte {e.start})")
    except OSError as e:
        fail(f"--task: {task} is neither a file ({e.strerror}) nor one of {', '.join(TASKS)}")
    except (ValueError, KeyError, TypeError, IndexError) as e:
        fail(f"{task}: line {n} is not {{prompt, target}} or {{prompt, choices, answer: an index}} ({type(e).__name__}: {e})")
    return examples or fail(f"{task}: has no examples")

# -----------------------------------------------------------------------------
# Scores

def encode(enc, prompt, target, block_size):
    # -> ids with the n of the target last, n, and whether the left was cut off. Tokenised jointly, whitespace at the end of the prompt counts as target
    if prompt and not prompt[-1].isspace() and not target[:1].isspace():
        target = " " + target
    context = enc.encode_ordinary(prompt.rstrip())
    ids = enc.encode_ordinary(prompt + target)
    n = max(0, len(ids) - len(context))
    ids = ids if context else [enc.eot_token] + ids # the first token needs something to be predicted from
    return ids[-block_size - 1:], min(n, block_size), len(ids) > block_size + 1

@torch.no_grad()
def nll(model, items, batch_size=8, amp=False):
    # items: (ids, n, ...) -> of each, the negative log-likelihood of its last n ids, in nats. Padding is on the right, where causal models do not look
    device, out = model.wte.weight.device, [0.0] * len(items)
    order = sorted((i for i, item in enumerate(items) if item[1]), key=lambda i: -len(items[i][0]))
    for start in tqdm(range(0, len(order), batch_size), disable=None):
        batch = order[start:start + batch_size]
        idx = torch.zeros(len(batch), len(items[batch[0]][0]) - 1, dtype=torch.int64) # (B, T)
        for row, i in zip(idx, batch):
            row[:len(items[i][0]) - 1] = torch.tensor(items[i][0][:-1])
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            x = model.trunk(idx.to(device)) # (B, T, C)
            for b, i in enumerate(batch):
                ids, n = items[i][:2]
                targets = torch.tensor([ids[-n:]], device=device) # (1, n)
                out[i] = model.head(x[b:b + 1, len(ids) - 1 - n:len(ids) - 1], targets)[1].item() * n
    return out

def score(model, enc, examples, batch_size=8, amp=False):
    """Scores of a list of examples, all (prompt, target) or all (prompt, choices, answer): a dict of numbers."""
    T, result = model.config.block_size, {"examples": len(examples)}
    pairs = [(e[0], target) for e in examples for target in ([e[1]] if len(e) == 2 else e[1])]
    items = [encode(enc, prompt, target, T) for prompt, target in pairs]
    losses = nll(model, items, batch_size, amp)
    result["truncated"] = sum(cut for *_, cut in items)
    if len(examples[0]) == 2:
        tokens, size = sum(n for _, n, _ in items), sum(len(enc.decode_bytes(ids[-n:])) for ids, n, _ in items if n)
        return {**result, "tokens": tokens, "bytes": size, "nats_per_token": sum(losses) / max(1, tokens), "nats_per_byte": sum(losses) / max(1, size)}
    losses, right, right_norm = iter(losses), 0, 0
    for _, choices, answer in examples:
        loss = [next(losses) for _ in choices]
        norm = [l / max(1, len(c)) for l, c in zip(loss, choices)] # by characters
        right += loss.index(min(loss)) == answer
        right_norm += norm.index(min(norm)) == answer
    return {**result, "acc": right / len(examples), "acc_norm": right_norm / len(examples)}

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.error = lambda message: fail(message.removeprefix("argument "), 2)
    p.add_argument("runs", nargs="+", help="run directories or ckpt.pt files")
    p.add_argument("--task", default="all", help=f"names and JSONL files, with commas between: {', '.join(TASKS)}; all")
    p.add_argument("--batch_size", type=int, default=8, help="sequences per pass")
    p.add_argument("--limit", type=int, default=0, help="examples per task, 0: all")
    p.add_argument("--tokenizer", default="", help="default: the checkpoint's")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", default="", help="also write the JSON to this file")
    args = p.parse_args(argv)
    try: # before the data sets are fetched
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as e:
        fail(f"--device: {args.device}: {str(e).splitlines()[0]}")
    for run in args.runs:
        Path(run).exists() or fail(f"{run}: no such run directory or checkpoint")
    tasks = {t: read_task(t)[:args.limit or None] for t in (TASKS if args.task == "all" else args.task.split(","))}
    results = {}
    for run in args.runs:
        model, ckpt = load_checkpoint(run)
        enc = get_tokenizer(args.tokenizer or own_tokenizer(ckpt))
        if enc.n_vocab > model.config.vocab_size:
            fail(f"{run}: its vocabulary of {model.config.vocab_size} is too small for its tokenizer {enc.name} of {enc.n_vocab}")
        amp = ckpt["config"].get("dtype") == "bfloat16" # as it was trained
        scores = {t: score(model.to(args.device), enc, examples, args.batch_size, amp) for t, examples in tasks.items()}
        for name, pair in CATEGORIES.items():
            if all(t in scores for t in pair):
                scores[name] = {"nats_per_token": sum(scores[t]["nats_per_token"] for t in pair) / 2}
        results[run] = {"tokenizer": args.tokenizer or own_tokenizer(ckpt), "step": ckpt.get("step"), **scores}
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        try:
            Path(args.out).write_text(text + "\n", encoding="utf-8")
        except OSError as e:
            fail(f"--out: {args.out}: {e.strerror}")
    return 0

if __name__ == "__main__":
    sys.exit(main())
