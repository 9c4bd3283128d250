# evaluate.py and sample.py on small random models of every architecture.
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
import torch

import evaluate
import sample
from prepare_fineweb import get_tokenizer
from train import build, find_models

ROOT = Path(evaluate.__file__).parent

@pytest.fixture(autouse=True, scope="module")
def one_thread(): # the models are too small for two
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

T, V = 32, 320

def checkpoint(path, model="preln", seed=0, tokenizer="bytes", **fields):
    # a run directory with random weights of some size: at the usual 0.02 every token is about as likely as another
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    fields = {**dict(n_layer=2, n_head=2, n_embd=16, block_size=T, vocab_size=V), **fields}
    gpt = build(model, **fields)
    with torch.no_grad():
        for p in gpt.parameters():
            p.normal_(std=0.3)
    torch.save({"model": gpt.state_dict(), "config": {"model": model, "tokenizer": tokenizer, **fields}}, path / "ckpt.pt")
    return path, gpt.eval()

def lines(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path

def run(capsys, *argv):
    assert evaluate.main([str(a) for a in argv]) == 0
    return json.loads(capsys.readouterr().out)

def fails(capsys, main, *argv, code=1):
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in argv])
    err = capsys.readouterr().err.strip().splitlines()
    assert e.value.code == code and len(err) == 1 and err[0].startswith("error: "), err
    return err[0]

@torch.no_grad()
def token_by_token(gpt, context, target):
    # -log p of each target id, one forward pass per token
    out = []
    for k in range(len(target)):
        logits = gpt(torch.tensor([(context + target[:k])]))[0][0, -1]
        out.append(-logits.double().log_softmax(-1)[target[k]].item())
    return out

ROWS = [{"prompt": "one two", "target": "three"}, {"prompt": "a ", "target": "b\n"}, {"prompt": "", "target": "é"}, {"prompt": "x:", "target": " y z"}]
IDS = [(b"one two", b" three"), (b"a", b" b\n"), (None, "é".encode()), (b"x:", b" y z")] # what counts as prompt and as target

def test_nll_is_the_sum_over_tokens(tmp_path, capsys):
    path, gpt = checkpoint(tmp_path / "run")
    got = run(capsys, path, "--task", lines(tmp_path / "t.jsonl", *ROWS), "--batch_size", 3)[str(path)][str(tmp_path / "t.jsonl")]
    want = [x for c, t in IDS for x in token_by_token(gpt, list(c) if c else [256], list(t))]
    assert got["tokens"] == got["bytes"] == len(want) == 6 + 3 + 2 + 4 and got["truncated"] == 0 and got["examples"] == 4
    assert got["nats_per_token"] == pytest.approx(sum(want) / len(want), rel=1e-5)

@pytest.mark.parametrize("model", find_models())
def test_padded_batch_equals_one_by_one(model, tmp_path):
    _, gpt = checkpoint(tmp_path / model, model)
    enc = get_tokenizer("bytes")
    items = [evaluate.encode(enc, "p" * n, "target"[:1 + n % 6], T) for n in (1, 30, 7, 3, 19, 12)]
    together, alone = evaluate.nll(gpt, items, 6), [evaluate.nll(gpt, [item], 1)[0] for item in items]
    assert together == pytest.approx(alone, rel=1e-5)
    left = [([0] * (31 - len(ids)) + ids, n) for ids, n, _ in items] # broken twin: padded on the left
    assert evaluate.nll(gpt, left, 6) != pytest.approx(alone, rel=1e-3)

def test_truncated_from_the_left(tmp_path):
    path, gpt = checkpoint(tmp_path / "run")
    enc = get_tokenizer("bytes")
    ids, n, cut = evaluate.encode(enc, "0123456789" * 5, "target", T)
    assert cut and len(ids) == T + 1 and n == 7 and bytes(ids) == ("0123456789" * 5 + " target")[-T - 1:].encode()
    assert not evaluate.encode(enc, "p" * (T + 1 - 7), "target", T)[2]
    ids, n, cut = evaluate.encode(enc, "p", "t" * 100, T) # only as much of a target as has a context
    assert cut and n == T and len(ids) == T + 1
    got = evaluate.score(gpt, enc, [("p" * 99, "target"), ("p", "t")])
    assert got["truncated"] == 1 and got["tokens"] == 9
    want = token_by_token(gpt, list(b"p" * (T + 1 - 7)), list(b" target")) + token_by_token(gpt, [112], list(b" t"))
    assert got["nats_per_token"] == pytest.approx(sum(want) / 9, rel=1e-5)

def test_multiple_choice(tmp_path, capsys):
    path, gpt = checkpoint(tmp_path / "run")
    rows = [{"prompt": f"question {i}:", "choices": ["a" * (1 + i % 3), "bcd", "e f"], "answer": i % 3} for i in range(12)]
    got = run(capsys, path, "--task", lines(tmp_path / "t.jsonl", *rows))[str(path)][str(tmp_path / "t.jsonl")]
    acc = acc_norm = 0
    for r in rows:
        loss = [sum(token_by_token(gpt, list(r["prompt"].encode()), list(f" {c}".encode()))[-T:]) for c in r["choices"]]
        acc += loss.index(min(loss)) == r["answer"]
        norm = [x / len(c) for x, c in zip(loss, r["choices"])]
        acc_norm += norm.index(min(norm)) == r["answer"]
    assert (got["acc"], got["acc_norm"]) == (acc / 12, acc_norm / 12) and acc != acc_norm

def test_tasks_of_the_hub(tmp_path, monkeypatch, capsys):
    # rows as the data sets have them
    rows = {"mbpp": {"text": "Add.", "code": "def f():\r\n  pass", "test_list": ["assert 1", "assert 2", "assert 3"]},
            "humaneval": {"prompt": "def f():\n", "canonical_solution": "    return 1\n"},
            "sciq": {"question": "Why?", "correct_answer": "so", "support": "Because."},
            "gpqa": {"Question": "Q?", "Correct Answer": "right\n", "Incorrect Answer 1": "w1", "Incorrect Answer 2": "w2", "Incorrect Answer 3": "w3", "Explanation": "E", "Record ID": "rec1"},
            "gsm8k": {"question": "2+2?", "answer": "It is 4.\n#### 4"}, "math500": {"problem": "$1$", "solution": "1"},
            "arc_easy": {"question": "Q?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
            "hellaswag": {"activity_label": "Jump", "ctx_a": "A man.", "ctx_b": "he", "endings": ["x [title] up", "[y]down"], "label": "1"},
            "piqa": {"goal": "Open it", "sol1": "pull", "sol2": "push", "label": 0}}
    names = {evaluate.TASKS[t][0]: t for t in rows}
    monkeypatch.setattr(evaluate, "load_dataset", lambda path, config, split: [rows[names[path]]])
    tasks = {t: evaluate.read_task(t)[0] for t in evaluate.TASKS}
    assert tasks["mbpp"] == ("You are an expert Python programmer, and here is your task: Add. Your code should pass these tests:\n\nassert 1\nassert 2\nassert 3\n[BEGIN]\n", "def f():\r\n  pass\n")
    assert tasks["sciq"] == ("Question: Why?\nAnswer:", "so\nExplanation: Because.")
    assert tasks["arc_easy"] == ("Question: Q?\nAnswer:", ["x", "y"], 1) and tasks["piqa"][2] == 0
    assert tasks["hellaswag"] == ("Jump: A man. He", ["x. up", "down"], 1)
    prompt, target = tasks["gpqa"]
    assert target == "right\nExplanation: E" and sorted(prompt[10:-8].split("\n")[1:3][0][:2]) == sorted("A.") and all(w in prompt for w in ("right", "w1", "w2", "w3"))
    path, _ = checkpoint(tmp_path / "run")
    got = run(capsys, path, "--limit", 1)[str(path)]
    assert got["math"]["nats_per_token"] == pytest.approx((got["gsm8k"]["nats_per_token"] + got["math500"]["nats_per_token"]) / 2)
    assert set(got) == {"tokenizer", "step", *evaluate.TASKS, *evaluate.CATEGORIES}

def test_refusals(tmp_path, monkeypatch, capsys):
    path, _ = checkpoint(tmp_path / "run")
    def offline(*a, **k):
        raise ConnectionError("no answer")
    monkeypatch.setattr(evaluate, "load_dataset", offline)
    assert "mbpp" in fails(capsys, evaluate.main, path) and "nowhere.jsonl" in fails(capsys, evaluate.main, path, "--task", "nowhere.jsonl")
    for bad in ({"prompt": "x"}, {"prompt": "x", "choices": ["a"], "answer": 1}, {"prompt": 1, "target": "x"}, ["x"], {"prompt": "x", "choices": ["a"], "answer": 0}):
        assert "line 2" in fails(capsys, evaluate.main, path, "--task", lines(tmp_path / "bad.jsonl", ROWS[0], bad))
    assert "no such run" in fails(capsys, evaluate.main, tmp_path / "none", "--task", lines(tmp_path / "t.jsonl", *ROWS))
    small, _ = checkpoint(tmp_path / "neox", tokenizer="gpt9")
    assert "gpt9" in fails(capsys, evaluate.main, small, "--task", tmp_path / "t.jsonl")
    fails(capsys, evaluate.main, "--task", code=2)
    for main in (evaluate.main, sample.main):
        assert "--device" in fails(capsys, main, path, "--device", "abacus")

# -----------------------------------------------------------------------------
# sample.py

def text(capsys, *argv):
    assert sample.main([str(a) for a in argv]) == 0
    return capsys.readouterr().out

@pytest.mark.parametrize("model", find_models())
def test_past_block_size(model, tmp_path):
    _, gpt = checkpoint(tmp_path / model, model, block_size=8)
    enc = get_tokenizer("bytes")
    for n in (0, 7, 8):
        ids = [256] + [97] * n
        out = list(sample.generate(gpt, enc, ids, 10, temperature=0))
        again = [gpt(torch.tensor([(ids + out)[max(0, len(ids) + k - 8):len(ids) + k]]))[0][0, -1, :257].argmax().item() for k in (0, len(out) - 1)]
        assert [out[0], out[-1]] == again and len(ids) == n + 1

def test_seeds_and_greedy(tmp_path, capsys):
    path, _ = checkpoint(tmp_path / "run")
    base = [path, "--prompt", "x = 1", "--max_new_tokens", 20]
    texts = [text(capsys, *base, *flags) for flags in (["--seed", 1], ["--seed", 1], ["--seed", 2], ["--seed", 2**40])]
    assert texts[0] == texts[1] != texts[2] != texts[3] and all(t.startswith("x = 1") for t in texts)
    greedy = [text(capsys, *base, *flags) for flags in (["--temperature", 0, "--seed", 1], ["--temperature=0", "--seed=2"], ["--top_k", 1], ["--temperature", 1e-40])]
    assert len(set(greedy)) == 1
    assert text(capsys, *base, "--num_samples", 0) == "" and text(capsys, *base, "--max_new_tokens", 0) == "x = 1\n"
    assert text(capsys, *base, "--num_samples", 2, "--temperature", 0).count(greedy[0]) == 2
    (tmp_path / "p.txt").write_text("x = 1", encoding="utf-8")
    assert text(capsys, path, "--prompt_file", tmp_path / "p.txt", "--max_new_tokens", 20, "--temperature", 0) == greedy[0]
    assert "--temperature" in fails(capsys, sample.main, path, "--temperature", -1) and "p.txt2" in fails(capsys, sample.main, path, "--prompt_file", tmp_path / "p.txt2")
    assert "--seed 99999999999999999999" in fails(capsys, sample.main, path, "--seed", 99999999999999999999)

class Fixed(torch.nn.Module): # a model that always wants the next id of a list
    def __init__(self, ids):
        super().__init__()
        self.config, self.ids, self.wte = type("C", (), {"block_size": 8}), list(ids), torch.nn.Embedding(1, 1)
    def trunk(self, idx):
        assert idx.shape[1] <= 8
        return idx
    def head(self, x):
        return torch.nn.functional.one_hot(torch.tensor([[self.ids.pop(0)]]), V).float() * 9, None

def test_top_k_end_of_text_and_padded_vocabulary():
    enc = get_tokenizer("bytes")
    assert list(sample.generate(Fixed([97, 98, 256, 99]), enc, [256], 9, temperature=0)) == [97, 98]
    assert list(sample.generate(Fixed([97, 300, 98]), enc, [256], 3, temperature=0)) == [97, 0, 98] # 300 pads the vocabulary
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0))
    model = Fixed([0])
    model.head = lambda x: (logits.view(1, 1, V).clone(), None)
    best = logits[:257].topk(5).indices.tolist()
    seen = {t for s in range(25) for t in sample.generate(model, enc, [256], 5, top_k=5, generator=torch.Generator().manual_seed(s))}
    assert seen == set(best) - {256}
    assert len({t for s in range(25) for t in sample.generate(model, enc, [256], 5, top_k=1000, generator=torch.Generator().manual_seed(s))}) > 20

def test_partial_utf8(tmp_path, monkeypatch, capsys):
    data = "é".encode() + b"\xff" + "雪".encode()[:2] + b"a" + "雪".encode()[:1]
    model = Fixed([*data, 256])
    model.config.vocab_size = V
    monkeypatch.setattr(sample, "load_checkpoint", lambda path: (model, {"config": {"tokenizer": "bytes"}}))
    assert text(capsys, "run", "--temperature", 0) == data.decode(errors="replace") + "\n"

def test_ascii_terminal(tmp_path):
    path, _ = checkpoint(tmp_path / "run é")
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "sample.py", str(path), "--prompt", "café", "--max_new_tokens", "20"], cwd=ROOT, env=env, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(b"caf") and not done.stderr, done.stderr

def test_ids_without_bytes(tmp_path, monkeypatch, capsys):
    # a tokenizer with gaps, and one that is too large for the model
    path, gpt = checkpoint(tmp_path / "run", tokenizer="gaps")
    make = lambda eot: tiktoken.Encoding("gaps", pat_str="(?s).{1,64}", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={"<|endoftext|>": eot})
    monkeypatch.setattr(sample, "get_tokenizer", lambda name: make(310))
    assert "\ufffd" in text(capsys, path, "--max_new_tokens", 200, "--temperature", 3)
    monkeypatch.setattr(sample, "get_tokenizer", lambda name: make(320))
    assert "321" in fails(capsys, sample.main, path)
