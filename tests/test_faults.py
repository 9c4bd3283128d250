"""
Faults by kind, and a little of what tests/faults.py does at length: kills, random flags, damaged files.
Run alone: python -m pytest -q tests/test_faults.py
"""
import io
import json
import os
import shlex
import signal
import time

import pytest
import torch
from ddp_worker import argv, ckpt, refused, same_end
from faults import fuzz_files, fuzz_flags, kills, one_fault, warm

import evaluate
import prepare_fineweb
import sample
import train

# -----------------------------------------------------------------------------
# Sizes and names beyond reason: one line, at once, without the memory

@pytest.mark.parametrize("text, words", [
    ("--n_layer 999999999999", "n_layer"), ("--n_embd 1e18 --n_head 1", "too large"), ("--d_ff 1e18", "too large"), ("--vocab_size 1e18", "too large"), ("--vocab_size 1e30", "vocab_size"),
    ("--model hc --n_streams 1e12", "too large"), ("--tokens_per_param 1e300", "tokens_per_param"), ("--batch_tokens 1e30", "batch_tokens"), ("--seed 9223372036854775808", "seed"),
    ("--n_layer " + "1" * 5000, "n_layer"), ("--run_name ..", "run_name")])
def test_beyond_reason(text, words, capsys):
    refused(capsys, ["--dry_run", *shlex.split(text)], words)

def test_long_name_in_a_dry_run(capsys):
    assert not train.main(["--dry_run", "--n_layer", "2", "--data", "x" * 300]) and json.loads(capsys.readouterr().out)["n_params"]

def test_long_block_in_a_dry_run(monkeypatch, capsys):
    # nothing of the length of a block is computed
    monkeypatch.setattr("sys.stdin", io.StringIO("--n_layer 2 --block_size 1e15 --batch_tokens 1e15"))
    assert train.main(["--dry_run", "-"]) == 0 and json.loads(capsys.readouterr().out)["block_size"] == 10**15

# -----------------------------------------------------------------------------
# Run directories in any state: nothing that was saved is overwritten, nothing stale is taken for done

def stop_after(step, monkeypatch):
    # SIGTERM in that step
    clip, calls = torch.nn.utils.clip_grad_norm_, []
    def clipped(*args):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return clip(*args)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)

@pytest.mark.parametrize("damage", ["missing", "cut", "not an object"])
def test_config_lost(damage, flags, tmp_path, capsys, monkeypatch):
    train.main(flags(run_name="straight"))
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert train.main(flags()) == 143
    config, saved = tmp_path / "r" / "config.json", (tmp_path / "r" / "ckpt.pt").read_bytes()
    text = config.read_text()
    config.unlink() if damage == "missing" else config.write_text(text[:200] if damage == "cut" else "[1]")
    capsys.readouterr()
    refused(capsys, flags(), "unfinished", "--resume") # a new run would have overwritten the checkpoint
    refused(capsys, flags(n_layer=3, resume=True), "n_layer 2 there, 3 here")
    assert (tmp_path / "r" / "ckpt.pt").read_bytes() == saved
    assert train.main(flags(resume=True)) == 0 and same_end(tmp_path / "straight", tmp_path / "r")
    assert json.loads(config.read_text())["n_layer"] == 2

def test_killed_between_config_and_result(flags, tmp_path, capsys, monkeypatch):
    # a longer schedule in the directory of a finished run, killed while its config.json is written: never "already finished"
    train.main(flags(steps=2))
    class Killed(BaseException):
        pass
    def cut(path, value):
        right(path, value)
        raise Killed
    right = train.write_json
    for how in ("before", "after"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(train, "write_json", cut if how == "after" else lambda *_: (_ for _ in ()).throw(Killed))
            train.main(flags(steps=4, resume=True))
        assert not (tmp_path / "r" / "result.json").exists()
    assert train.main(flags(steps=4, resume=True)) == 0 and ckpt(tmp_path / "r")["step"] == 4

@pytest.mark.parametrize("part, value", [("step", 1.5), ("step", -1), ("step", "3"), ("seconds", None), ("optimizers", {}), ("rng", [1]), ("config", {"model": ["preln"]})])
def test_parts_of_another_kind(part, value, flags, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        train.main(flags())
    torch.save({**ckpt(tmp_path / "r"), part: value}, tmp_path / "r" / "ckpt.pt")
    capsys.readouterr()
    if part == "config":
        with pytest.raises(SystemExit):
            train.load_checkpoint(tmp_path / "r")
        assert "preln" in capsys.readouterr().err
    else:
        refused(capsys, flags(resume=True), "ckpt.pt", part if part in ("step", "seconds") else "does not fit")

# -----------------------------------------------------------------------------
# What files say about other files is not followed

def one_line(capsys, main, *args):
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    err = capsys.readouterr().err
    assert e.value.code == 1 and err.startswith("error: ") and err.count("\n") == 1, err
    return err

def test_a_file_that_a_checkpoint_names(flags, tmp_path, capsys, monkeypatch):
    train.main(flags(steps=1, vocab_size=320))
    saved, secret = ckpt(tmp_path / "r"), tmp_path / "secret.json"
    secret.write_text('{"normalizer": {"type": "secret"}}')
    saved["config"].update(tokenizer=f"neox:{secret}", data="/", out_dir=str(tmp_path / "elsewhere"), run_name="../../r")
    torch.save(saved, tmp_path / "r" / "ckpt.pt")
    (tmp_path / "t.jsonl").write_text('{"prompt": "a", "target": "b"}')
    read = []
    monkeypatch.setattr(prepare_fineweb, "neox", read.append)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert f"--tokenizer neox:{secret}" in one_line(capsys, sample.main, tmp_path / "r") and "--tokenizer" in one_line(capsys, evaluate.main, tmp_path / "r", "--task", tmp_path / "t.jsonl")
    assert not read and before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(AttributeError):
        sample.main([str(tmp_path / "r"), "--tokenizer", f"neox:{secret}"]) # named by the user: opened
    assert read == [str(secret)]

@pytest.mark.parametrize("change", [dict(tokens={"../val.bin": 4, "/etc/passwd": 4}), dict(tokens=[1]), dict(skipped={"x": "y"}), dict(dtype="x"), dict(documents=None), "cut", b"\xff"])
def test_meta_of_another(change, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("line\n" * 900)
    args = ["--source", tmp_path / "a.txt", "--tokenizer", "bytes", "--out_dir", tmp_path / "d"]
    prepare_fineweb.main([str(a) for a in args])
    meta = tmp_path / "d" / "meta.json"
    text = json.dumps({**json.loads(meta.read_text()), **change}).encode() if isinstance(change, dict) else change if isinstance(change, bytes) else meta.read_bytes()[:50]
    meta.write_bytes(text)
    assert "meta.json" in one_line(capsys, prepare_fineweb.main, *args) and meta.read_bytes() == text
    if change == dict(tokens=[1]):
        assert "meta.json" in one_line(capsys, train.main, *argv(data=tmp_path / "d", vocab_size=None))

# -----------------------------------------------------------------------------
# Faults in mid-run: one line, exit status 1, and the same end after --resume (the others: tests/faults.py matrix)

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("faults")
    return warm(tmp), tmp

@pytest.mark.parametrize("name", ["NaN", "disk full in the log", "other ids in the data", "nobody reads stdout", "clock backwards", "a rank is killed"])
def test_fault(name, place):
    one_fault(name, 4, *place)

def test_fault_broken(place, monkeypatch):
    # the check sees a run that does not notice
    monkeypatch.setattr(train, "stamp", lambda path: None)
    with pytest.raises(AssertionError):
        one_fault("other ids in the data", 4, *place)

# -----------------------------------------------------------------------------
# A little of what tests/faults.py does at length

def test_some_kills(tmp_path):
    told = kills(4, 0, tmp_path, steps=8)
    assert told["kills"] == 4 and told["bit_equal"] == told["runs"] > 0

def test_kills_broken(tmp_path, monkeypatch):
    # a checkpoint that is written in place, slowly, does not survive
    def in_place(path, write):
        path.write_bytes(b"")
        time.sleep(0.5 * (path.name == "ckpt.pt"))
        with open(path, "wb") as f:
            write(f)
    monkeypatch.setattr(train, "write_atomic", in_place)
    with pytest.raises((AssertionError, RuntimeError, EOFError)):
        kills(4, 0, tmp_path, steps=2)

def test_some_random_flags(tmp_path):
    counts, failed = fuzz_flags(100, 1, tmp_path)
    assert not failed and counts["works"] > 10 and counts["refused"] > 10

def test_some_damaged_files(tmp_path):
    counts, failed = fuzz_files(20, 1, tmp_path)
    assert not failed and counts["works"] and counts["refused"]
