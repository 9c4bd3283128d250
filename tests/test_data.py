# prepare_fineweb.py: what it writes, what it leaves out, what happens when it is killed, cut off or misused.
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import prepare_fineweb

ROOT = Path(prepare_fineweb.__file__).parent
EOT = 256

def prepare(source, out, *flags):
    return prepare_fineweb.main(["--source", str(source), "--out_dir", str(out), "--tokenizer", "bytes", *map(str, flags)])

def fails(capsys, *argv, code=1):
    with pytest.raises(SystemExit) as e:
        prepare_fineweb.main([str(a) for a in argv])
    err = capsys.readouterr().err.strip().splitlines()
    assert e.value.code == code and err[-1].startswith("error: "), err
    return err[-1]

def read(path):
    header = np.fromfile(path, "<i4", 256)
    dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[tuple(header[:2])]
    ids = np.fromfile(path, dtype, offset=1024)
    assert header[2] == len(ids) and not header[3:].any()
    return ids

def documents(out):
    # the documents of all shards in order, as text
    ids = np.concatenate([read(p) for p in sorted(out.glob("*.bin"), key=lambda p: (p.name[0] != "v", p.name))])
    assert ids[0] == EOT
    return [bytes(d.astype(np.uint8)).decode() for d in np.split(ids, np.flatnonzero(ids == EOT)[1:]) for d in [d[1:]]]

def digests(out):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(out).iterdir())}

def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path

@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", [f"document {i} é 雪 " + "x" * (i * 37 % 90) for i in range(400)])

def test_shards_hold_the_documents(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare(corpus, out, "--shard_tokens", 4000) == 0
    assert documents(out) == [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    meta = json.loads((out / "meta.json").read_text())
    assert meta["complete"] and meta["documents"] == 400 and meta["vocab_size"] == 257 and meta["dtype"] == "uint16"
    assert {f: len(read(out / f)) for f in meta["tokens"]} == meta["tokens"] and set(meta["tokens"]) == {p.name for p in out.glob("*.bin")}
    assert all(4000 <= n < 4200 for n in list(meta["tokens"].values())[1:-1]) # whole documents
    assert 0.05 < meta["tokens"]["val_000000.bin"] / sum(meta["tokens"].values()) < 0.06
    closing = capsys.readouterr().out.splitlines()[-1]
    assert "complete" in closing and f"{list(meta['tokens'].values())[-1]:,} in the last" in closing
    before = digests(out)
    assert prepare(corpus, out, "--shard_tokens", 4000) == 0 and digests(out) == before # nothing to do

def test_text_files(tmp_path):
    # one document a file, in pieces that never cut a character, BOM and CRLF gone, validation inside the file
    text = "\n" * 5000 + "".join(f"line {i} été 雪\n" for i in range(3000)) + " \n" * 5000
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (tmp_path / "b.txt").write_text("雪" * 9000, encoding="utf-8") # no line end
    assert prepare(tmp_path, tmp_path / "out") == 0
    first, second = documents(tmp_path / "out")
    assert first.lstrip("\n") == text.lstrip("\n") and second == "雪" * 9000 # blank pieces stay, but for those at the beginning
    assert len(read(tmp_path / "out/val_000000.bin")) < 7000

def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {i}" for i in range(100)]
    parquet.write_table(__import__("pyarrow").table({"id": list(range(100)), "text": texts}), tmp_path / "a.parquet")
    assert prepare(tmp_path / "*.parquet", tmp_path / "out") == 0
    assert documents(tmp_path / "out") == texts and (read(tmp_path / "out/val_000000.bin") == EOT).sum() == 6 # the one that reaches 5 %

def test_special_tokens_are_text(tmp_path, monkeypatch):
    texts = ["before <|endoftext|> after", "<|endoftext|>", "<|endofprompt|> <|fim_prefix|> <|im_start|>", "plain"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    assert prepare(source, tmp_path / "out", "--val_tokens", 1) == 0
    assert documents(tmp_path / "out") == texts
    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", lambda self, text: self.encode(text, allowed_special="all")) # broken twin
    prepare(source, tmp_path / "twin", "--val_tokens", 1)
    assert len(documents(tmp_path / "twin")) > len(texts)

def test_what_is_left_out_is_counted(tmp_path, capsys):
    rows = [json.dumps(r) for r in ({"text": ""}, {"text": None}, {"text": "  \n\t"}, {"body": "x"}, {"text": 42}, {"text": ["a"]}, [1])] + ["{not json", ""]
    good = json.dumps({"text": "good \ud800"})
    lines = [json.dumps({"text": "first"}), *rows, good]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b'\r\n{"text": "caf\xe9"}\r\n')
    assert prepare(tmp_path / "a.jsonl", tmp_path / "out", "--val_tokens", 1) == 0
    assert documents(tmp_path / "out") == ["first", "good \ufffd"]
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["skipped"] == {"empty": 3, "null": 1, "without text (fields: body)": 1, "not a string": 2, "without text (fields: )": 1, "not JSON": 1, "not UTF-8": 1}
    said = capsys.readouterr()
    assert "2 not a string" in said.out and "a.jsonl line 9" in said.err
    assert f"byte {(tmp_path / 'a.jsonl').read_bytes().index(0xe9)}" in said.err

def test_nothing_to_train_on(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    write_jsonl(tmp_path / "one.jsonl", ["only one"])
    (tmp_path / "body.jsonl").write_text(json.dumps({"url": 1, "body": "x"}) * 1)
    for name in ("empty", "one", "body"):
        said = fails(capsys, "--source", tmp_path / f"{name}.jsonl", "--tokenizer", "bytes", "--out_dir", tmp_path / name)
        assert f"{name}.jsonl" in said
    (tmp_path / "latin.txt").write_bytes("a café".encode("latin-1"))
    assert "byte 5" in " ".join(fails(capsys, "--source", tmp_path / "latin.txt", "--tokenizer", "bytes", "--out_dir", tmp_path / "latin").split())

def test_long_runs(tmp_path):
    # a million equal characters: seconds, whatever the version of tiktoken
    ranks = {bytes([b]): b for b in range(256)} | {c * n: 256 + i for i, (c, n) in enumerate((c, n) for c in (b"^", b" ", b"a") for n in (2, 4, 8, 16))}
    enc = tiktoken.Encoding("runs", pat_str=r" ?\p{L}+| ?[^\s\p{L}]+|\s+(?!\S)|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300})
    for c in "^ a":
        ids = prepare_fineweb.encode(enc, "b" + c * 1_000_000 + "b", True, "uint16")
        assert ids[0] == 300 and enc.decode(ids[1:].tolist()) == "b" + c * 1_000_000 + "b" and len(ids) < 64_000

class Killed(BaseException):
    pass

def test_killed_anywhere_and_rerun(corpus, tmp_path, monkeypatch):
    # stopped at every rename in turn, before it and behind it
    flags = ["--shard_tokens", 6000, "--max_tokens", 20_000, "--num_workers", 2]
    prepare(corpus, tmp_path / "whole", *flags)
    want = digests(tmp_path / "whole")
    replace = Path.replace
    for stop in range(12):
        out, calls = tmp_path / f"cut{stop}", []
        def cut(self, target):
            calls.append(target)
            if len(calls) > stop // 2 + 1 and stop % 2 == 0:
                raise Killed
            replace(self, target)
            if len(calls) > stop // 2 + 1:
                raise Killed
        monkeypatch.setattr(Path, "replace", cut)
        with pytest.raises(Killed):
            prepare(corpus, out, *flags)
        monkeypatch.setattr(Path, "replace", replace)
        left = json.loads((out / "meta.json").read_text())
        assert not left["complete"] or digests(out) == want
        assert prepare(corpus, out, *flags) == 0 and digests(out) == want, stop
    (out / "meta.json").write_text(json.dumps({**left, "place": left["place"] - 1})) # broken twin: a document is read twice
    prepare(corpus, out, *flags)
    assert digests(out) != want

def test_kill_9(corpus, tmp_path):
    flags = ["--shard_tokens", "3000", "--tokenizer", "bytes"]
    script = ("import os, signal, sys, pathlib, prepare_fineweb as p\nreplace = pathlib.Path.replace\n"
              "def cut(self, target):\n    replace(self, target)\n    if target.name == 'train_000001.bin': os.kill(os.getpid(), signal.SIGKILL)\n"
              "pathlib.Path.replace = cut\np.main(sys.argv[1:])")
    argv = ["--source", str(corpus), "--out_dir", str(tmp_path / "cut"), *flags]
    assert subprocess.run([sys.executable, "-c", script, *argv], cwd=ROOT).returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "cut/meta.json").read_text())["complete"] is False
    # the rerun under spawn, as a script
    code = f"import multiprocessing, runpy, sys; multiprocessing.set_start_method('spawn'); sys.argv = ['x'] + {argv!r}; runpy.run_path('prepare_fineweb.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "complete" in done.stdout, done.stderr
    prepare(corpus, tmp_path / "whole", *flags)
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")

def test_shards_do_not_depend_on_workers_or_max_tokens(corpus, tmp_path):
    for workers in (0, 1, 999):
        prepare(corpus, tmp_path / f"w{workers}", "--num_workers", workers, "--max_tokens", 9000)
    assert digests(tmp_path / "w0") == digests(tmp_path / "w1") == digests(tmp_path / "w999")
    prepare(corpus, tmp_path / "short", "--max_tokens", 3000)
    assert digests(tmp_path / "short")["val_000000.bin"] == digests(tmp_path / "w1")["val_000000.bin"]
    short, long = read(tmp_path / "short/train_000000.bin"), read(tmp_path / "w1/train_000000.bin")
    assert len(short) == 3000 and len(long) == 9000 and (short == long[:3000]).all()

def rows(n=200):
    return [{"text": f"hub document {i}"} for i in range(n)]

class Broken: # a stream that ends in an error behind so many rows
    def __init__(self, n):
        self.n = n
    def __iter__(self):
        yield from rows()[:self.n]
        raise ConnectionError("peer went away")

def test_broken_stream(tmp_path, monkeypatch, capsys):
    streams, naps = [Broken(50), Broken(50), Broken(120), rows()], []
    monkeypatch.setattr(prepare_fineweb, "load_dataset", lambda *a, **k: streams.pop(0))
    monkeypatch.setattr(prepare_fineweb.time, "sleep", naps.append)
    assert prepare("fineweb_edu", tmp_path / "a", "--val_tokens", 100, "--shard_tokens", 500) == 0
    assert documents(tmp_path / "a") == [r["text"] for r in rows()] and naps == [2, 4, 2]
    # always broken at the same row: gives up, and a later run goes on to the same bytes
    monkeypatch.setattr(prepare_fineweb, "load_dataset", lambda *a, **k: Broken(120))
    said = fails(capsys, "--source", "fineweb_edu", "--out_dir", tmp_path / "b", "--tokenizer", "bytes", "--val_tokens", 100, "--shard_tokens", 500)
    assert "peer went away" in said and "run again" in said and len(naps) == 3 + 5
    assert json.loads((tmp_path / "b/meta.json").read_text())["place"] > 50
    monkeypatch.setattr(prepare_fineweb, "load_dataset", lambda *a, **k: rows())
    assert prepare("fineweb_edu", tmp_path / "b", "--val_tokens", 100, "--shard_tokens", 500) == 0
    assert digests(tmp_path / "a") == digests(tmp_path / "b")

def test_stream_state(tmp_path):
    # with the state_dict of a real streamed data set, nothing is read twice or left out
    datasets, pq, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for i in range(2):
        pq.write_table(pa.table({"text": [f"{i} {j}" for j in range(250)]}), tmp_path / f"{i}.parquet", row_group_size=70)
    load = lambda: datasets.load_dataset("parquet", data_files=[str(tmp_path / f"{i}.parquet") for i in range(2)], split="train", streaming=True)
    whole = [(json.loads(json.dumps(place)), row[0]["text"]) for place, row in prepare_fineweb.read(load, 0, "x", 0)]
    for cut in (0, 69, 70, 249, 250, 400, 499):
        assert [row[0]["text"] for _, row in prepare_fineweb.read(load, whole[cut][0], "x", 0)] == [text for _, text in whole[cut + 1:]]

def test_no_network(tmp_path, monkeypatch, capsys):
    for key in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(key, "http://127.0.0.1:9") # nothing listens there
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    said = fails(capsys, "--source", "stdlib", "--tokenizer", "gpt2", "--out_dir", tmp_path / "a")
    assert "TIKTOKEN_CACHE_DIR" in said and "6d1cbeee0f20b3d9449abfede4726ed8212e3aee" in said and not (tmp_path / "a").exists()
    # the hub, which would retry for half a minute
    class Hub:
        config = type("config", (), {"HF_ENDPOINT": "https://hub.invalid"})
        load_dataset = staticmethod(lambda *a, **k: __import__("threading").Event().wait(60))
    monkeypatch.setitem(sys.modules, "datasets", Hub)
    said = fails(capsys, "--tokenizer", "bytes", "--out_dir", tmp_path / "a")
    assert "fineweb_edu" in said and "stdlib" in said

def test_misuse(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    prepare(corpus, out, "--shard_tokens", 4000)
    base = ["--source", corpus, "--out_dir", out, "--tokenizer", "bytes"]
    assert "shard_tokens 4000, not 5000" in fails(capsys, *base, "--shard_tokens", 5000)
    (out / "train_000002.bin").unlink()
    assert "train_000002.bin" in fails(capsys, *base, "--shard_tokens", 4000)
    assert "--max_token" in fails(capsys, "--max_token", "5", code=2)
    for value in ("many", "inf", "nan", "-5"):
        assert "--max_tokens" in (line := fails(capsys, "--max_tokens=" + value, code=2)) and value in line
    assert "known: bytes" in fails(capsys, "--source", corpus, "--tokenizer", "gpt-2")
    assert "nowhere.txt" in fails(capsys, "--source", tmp_path / "nowhere.txt", "--tokenizer", "bytes")
    (tmp_path / "file").write_text("x")
    assert "file" in fails(capsys, "--source", corpus, "--tokenizer", "bytes", "--out_dir", tmp_path / "file/out")
    assert "--tokenizer" in fails(capsys, "--source", corpus, "--tokenizer", f"neox:{tmp_path / 'nothing.json'}")

def test_wide_vocabulary(corpus, tmp_path, monkeypatch):
    enc = tiktoken.Encoding("wide", pat_str="(?s).{1,64}", mergeable_ranks={bytes([b]): b + 70_000 for b in range(256)}, special_tokens={"<|endoftext|>": 66_000})
    monkeypatch.setattr(prepare_fineweb, "get_tokenizer", lambda name: enc)
    prepare(corpus, tmp_path / "out")
    ids = read(tmp_path / "out/train_000000.bin")
    assert ids.dtype == np.uint32 and ids[0] == 66_000 and enc.decode(ids[1:40].tolist()).startswith("document 21")

def neox_file(path):
    # the shape of GPT-NeoX's tokenizer.json: BPE over byte letters, NFC, two and more spaces as added tokens
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(sorted({*range(256)} - {*plain}))}
    words = ["<|endoftext|>", "<|padding|>", *(letters[b] for b in range(256)), "ĠĠ", "Ġt", "he", "Ġthe", "ĊĠ"]
    merges = ["Ġ Ġ", "Ġ t", "h e", "Ġt he", "Ċ Ġ"]
    added = [("<|endoftext|>", 0), ("<|padding|>", 1), *((" " * n, 271 - n) for n in range(2, 9))]
    flags = dict(single_word=False, lstrip=False, rstrip=False)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
    spec = dict(version="1.0", truncation=None, padding=None, added_tokens=[dict(id=i, content=t, special=i < 2, normalized=i > 1, **flags) for t, i in sorted(added, key=lambda x: x[1])],
                normalizer=dict(type="NFC"), pre_tokenizer=level, post_processor=level, decoder=level,
                model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
                           vocab={w: i for i, w in enumerate(words)}, merges=merges))
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path

def test_neox(tmp_path):
    enc = prepare_fineweb.get_tokenizer(f"neox:{neox_file(tmp_path / 'tokenizer.json')}")
    assert enc.eot_token == 0 and enc.n_vocab == 270
    the, line = 261, 2 + 10
    assert enc.encode_ordinary(" the the") == [the, the]
    assert enc.encode_ordinary("\n    the") == [line, 267, 2 + ord("t"), 260] # four spaces are one token, taken out before BPE
    assert enc.encode_ordinary("e\u0301") == enc.encode_ordinary("\u00e9") # NFC
    assert 0 not in enc.encode_ordinary("<|endoftext|>")
    text = "a  b\n   c \n\t d" + " " * 20 + "é 雪 the\n"
    assert enc.decode(enc.encode_ordinary(text)) == text
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return
    reference = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for s in (text, "\n    the", " " * 9 + "the", "x \n  \n the", "it's  the\u00a0 the  ", "a\t  b   "):
        assert enc.encode_ordinary(s) == reference.encode(s, add_special_tokens=False).ids, s
