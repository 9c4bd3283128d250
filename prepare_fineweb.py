"""
Text -> token shards for train.py.

    python prepare_fineweb.py                                FineWeb-Edu, streamed from the hub, GPT-2 tokens
    python prepare_fineweb.py --source stdlib                the running Python's own library, bytes: no network, seconds
    python prepare_fineweb.py --source "books/*.txt"         .txt, .jsonl, .parquet: a file, a folder or a glob

Writes val_000000.bin, train_000000.bin ... and meta.json. A shard is 256 int32 (magic, version, count), then the ids: uint16
as in llm.c, or uint32. One end-of-text token stands before every document. Killed and run again, it goes on behind the last
whole shard and ends with the same bytes.
"""
import argparse
import codecs
import glob
import hashlib
import json
import os
import re
import sys
import sysconfig
import time
import unicodedata
from collections import deque
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import requests
import tiktoken
from tqdm import tqdm

HUB = {"fineweb_edu": "HuggingFaceFW/fineweb-edu", "fineweb": "HuggingFaceFW/fineweb"}
HEADER = {"uint16": (20240520, 1), "uint32": (20240801, 7)} # magic, version
SUFFIXES = (".txt", ".jsonl", ".parquet")

def fail(message, code=1): # as in train.py, which needs torch
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)

def patient(f, url):
    # f(); without a network tiktoken and the hub wait for long, so after 6 s url must answer, or requests raises
    result = ThreadPool(1).apply_async(f)
    result.wait(6)
    if not result.ready():
        requests.head(url, timeout=3)
    return result.get()

def load_dataset(*args, **kwargs):
    import datasets # slow
    return patient(lambda: datasets.load_dataset(*args, **kwargs), datasets.config.HF_ENDPOINT)

# -----------------------------------------------------------------------------
# Tokenizers

class NFC(tiktoken.Encoding):

    def encode_ordinary(self, text):
        return super().encode_ordinary(unicodedata.normalize("NFC", text))

def neox(path):
    # GPT-NeoX's tokenizer.json: byte-level BPE, GPT-2's pattern, ids in merge order; runs of spaces are taken out before BPE
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    if (spec["normalizer"]["type"], spec["pre_tokenizer"]["type"]) != ("NFC", "ByteLevel"):
        raise ValueError("not a tokenizer like GPT-NeoX's")
    special = {t["content"]: t["id"] for t in spec["added_tokens"]}
    runs = {t: special.pop(t) for t in list(special) if not t.strip(" ")}
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)] # bytes written as themselves, the others as U+0100 and up
    byte = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*plain}))}
    ranks = {bytes(map(byte.get, word)): i for word, i in spec["model"]["vocab"].items() if word not in special}
    run = "|".join(sorted(runs, key=len, reverse=True)) or "(?!)"
    pattern = rf"{run}|'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|(?:(?!{run})\s)+(?!\S)|(?:(?!{run})\s)+"
    return NFC("neox", pat_str=pattern, mergeable_ranks=ranks | {t.encode(): i for t, i in runs.items()}, special_tokens=special)

def get_tokenizer(name):
    # "bytes", "neox:<tokenizer.json>" or a name that tiktoken knows -> tiktoken.Encoding
    if name == "bytes":
        return tiktoken.Encoding(name, pat_str="(?s).{1,64}", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={"<|endoftext|>": 256})
    try:
        return neox(name[5:]) if name.startswith("neox:") else patient(lambda: tiktoken.get_encoding(name), "https://openaipublic.blob.core.windows.net")
    except requests.RequestException as e:
        url = e.request.url
        fail(f"--tokenizer: {name} cannot be downloaded; with a network run TIKTOKEN_CACHE_DIR=tok python -c \"import tiktoken; tiktoken.get_encoding('{name}')\", "
             f"bring tok here (it holds {url} as {hashlib.sha1(url.encode()).hexdigest()}) and set TIKTOKEN_CACHE_DIR to it")
    except (OSError, ValueError, KeyError, TypeError) as e:
        fail(f"--tokenizer: {name}: {type(e).__name__} {str(e).splitlines()[0]}; known: bytes, neox:<tokenizer.json>, {', '.join(tiktoken.list_encoding_names())}")

def encode(enc, text, first, dtype):
    # runs of 4,096 characters are cut: tiktoken's time grows with their square, and a million spaces overflow its stack
    if defect(text):
        return None
    parts = re.split(r"(\S{4096}|\s{4096})", text) if len(text) > 20_000 else [text]
    return np.array([enc.eot_token] * first + [i for part in parts for i in enc.encode_ordinary(part)], dtype)

# -----------------------------------------------------------------------------
# Sources: rows (text, does a document begin here, bytes of the source)

def find_files(source):
    # the files of a local source in a fixed order; none: a name on the hub
    if source == "stdlib":
        root, skip = Path(sysconfig.get_path("stdlib")), {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        files = [p.relative_to(root) for p in root.rglob("*") if p.suffix in (".py", ".rst", ".txt")]
        return [root / p for p in sorted(files, key=lambda p: hashlib.sha256(p.as_posix().encode()).digest()) if not skip.intersection(p.parts)]
    paths = Path(source).rglob("*") if Path(source).is_dir() else map(Path, glob.glob(source, recursive=True) or [source])
    files = sorted((p for p in paths if p.suffix in SUFFIXES and p.is_file()), key=Path.as_posix)
    if not files and (Path(source).exists() or Path(source).suffix in SUFFIXES):
        fail(f"--source: {source}: no {', '.join(SUFFIXES)} file there")
    return files

def text_of(row, source):
    return row["text"] if "text" in row else fail(f"--source: {source} has no column text, only {', '.join(row)}")

def local_rows(path, limit):
    # by hand, as datasets stops at a broken line of JSON and hides at which byte a text is not UTF-8. A .txt is one document, in
    # pieces: memory stays small, and validation can end inside it. In place of a text: (why it is left out, where)
    decoder, size, jsonl = codecs.getincrementaldecoder("utf-8-sig")(), path.stat().st_size, path.suffix == ".jsonl"
    with open(path, "rb") as f:
        for n, piece in enumerate(iter(f.readline if jsonl else lambda: f.read(limit) + f.readline(limit), b""), 1):
            try:
                text = decoder.decode(piece, jsonl or f.tell() >= size).replace("\r\n", "\n")
                if jsonl and text.strip():
                    row = json.loads(text)
                    text = row["text"] if isinstance(row, dict) and "text" in row else ("without text", f"{path} line {n}: {text[:60]}")
            except UnicodeDecodeError as e:
                text = ("not UTF-8", f"{path} byte {f.tell() - len(e.object) + e.start}")
            except (ValueError, RecursionError):
                text = ("not JSON", f"{path} line {n}")
            yield text, n == 1 or jsonl, len(piece)

def file_rows(files, limit):
    for path in files:
        if path.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile
            cost = path.stat().st_size / max(1, ParquetFile(path).metadata.num_rows)
            for row in load_dataset("parquet", data_files=glob.escape(str(path)), split="train", streaming=True):
                yield text_of(row, path), True, cost
        else:
            yield from local_rows(path, limit)

def defect(text):
    # why a text is left out
    return (text[0] if isinstance(text, tuple) else "null" if text is None else "not a string" if not isinstance(text, str) else "" if text.strip() else "empty")

def read(open_rows, place, source, retries):
    # (place, row) of every row behind place, which is a state_dict of the data set, or a number of rows where it has none
    failures, tries = 0, 0
    while True:
        try:
            data = open_rows()
            if isinstance(place, dict):
                data.load_state_dict(place)
            for n, row in enumerate(data, 1):
                if isinstance(place, dict) or n > place:
                    place, failures, tries = data.state_dict() if hasattr(data, "state_dict") else n, 0, retries
                    yield place, row
            return
        except Exception as e: # a long stream breaks now and then, with a dozen kinds of errors
            failures += 1
            why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
            if failures > tries:
                fail(f"--source: {source}: {why}; run again to go on, or without a network use --source stdlib or local files")
            print(f"note: the stream broke ({why}), try {failures} of {tries}", file=sys.stderr)
            time.sleep(2 ** failures)

def encoded(rows, enc, dtype, workers):
    # (place, row, future ids) in the order of the rows; tiktoken frees the GIL, so threads do; few are in flight: memory is bounded
    with ThreadPool(workers) as pool:
        flight = deque()
        for place, row in rows:
            flight.append((place, row, pool.apply_async(encode, (enc, *row[:2], dtype))))
            if len(flight) > 8 * workers:
                yield flight.popleft()
        yield from flight

# -----------------------------------------------------------------------------
# Shards

def earlier(out, settings):
    # meta.json as of the last whole shard of an earlier run in out, or a fresh one
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8")) if (out / "meta.json").exists() else {"tokens": {}}
    if len(meta["tokens"]) < 2: # no training shard yet
        if "source" not in meta and any(out.glob("*.bin")):
            fail(f"--out_dir: {out} holds shards without a meta.json; choose another")
        return {**settings, "complete": False, "place": 0, "read": 0, "documents": 0, "skipped": {}, "tokens": {}}
    for key, value in settings.items():
        if value is not None and meta[key] != value:
            fail(f"--out_dir: {out} was prepared with {key} {meta[key]}, not {value}; choose another or delete it")
    for name, n in meta["tokens"].items():
        if not (out / name).exists() or (out / name).stat().st_size != 1024 + n * np.dtype(meta["dtype"]).itemsize:
            fail(f"{out / name}: does not hold its {n:,} tokens; delete {out} and prepare it again")
    return meta

def prepare(out, meta, rows, total):
    # rows: (place, row, future ids) behind meta["place"]; total: bytes of a local source, 0: the hub
    goal, pieces, size, skipped = meta["max_tokens"] or sys.maxsize, [], 0, meta["skipped"]
    val_tokens, val_bytes = meta["val_tokens"] or 10_485_760, 0.05 * total if total and not meta["val_tokens"] else sys.maxsize
    trained = sum(n for f, n in meta["tokens"].items() if f.startswith("train"))
    def write(name, *parts): # under a temporary name until it is whole
        temporary = out / (name + ".tmp")
        temporary.write_bytes(b"".join(parts))
        temporary.replace(out / name)
    def save():
        if size:
            name = f"train_{len(meta['tokens']) - 1:06d}.bin" if meta["tokens"] else "val_000000.bin"
            write(name, np.array([*HEADER[meta["dtype"]], size] + [0] * 253, "<i4"), *pieces)
            meta["tokens"][name] = size
        write("meta.json", json.dumps(meta, indent=1).encode())
    out.mkdir(parents=True, exist_ok=True)
    save()
    with tqdm(total=total or meta["max_tokens"] or None, initial=meta["read"] if total else trained, unit="B" if total else "tok", unit_scale=True, disable=None) as bar:
        for meta["place"], (text, first, cost), ids in rows:
            meta["read"] += cost
            bar.update(cost)
            if why := defect(text):
                skipped[why] = skipped.get(why, 0) + 1
                if skipped[why] == 1 and isinstance(text, tuple):
                    bar.write(f"note: {text[1]}: {why}, left out", file=sys.stderr)
                continue
            ids, training = ids.get(), bool(meta["tokens"])
            if training:
                ids = ids[:goal - trained]
                trained += len(ids)
            pieces.append(ids)
            size += len(ids)
            meta["documents"] += first
            bar.update(0 if total else len(ids))
            if trained >= goal:
                break
            if size >= meta["shard_tokens"] if training else size >= val_tokens or meta["read"] >= val_bytes:
                save()
                pieces, size = [], 0
        bar.total = bar.n # full, wherever it ended
    skips = "skipped " + (", ".join(f"{n:,} {why}" for why, n in skipped.items()) or "nothing")
    if not trained:
        fail(f"--source: {meta['source']} has nothing to train on: {meta['documents']:,} documents, {size:,} tokens; {skips}")
    meta["complete"] = True
    save()
    print(skips)

def count(text):
    n = int(float(text) if "e" in text else text)
    return n if n >= 0 else int("negative")

def main(argv=None):
    p = argparse.ArgumentParser(description="Text -> token shards.", allow_abbrev=False)
    p.error = lambda message: fail(message.removeprefix("argument "), 2)
    p.add_argument("--source", default="fineweb_edu", help="fineweb_edu, fineweb, another name on the hub, stdlib, or .txt, .jsonl, .parquet files (one, a folder, a glob)")
    p.add_argument("--name", default="", help="configuration on the hub (default for FineWeb: sample-100BT; sample-10BT will do for 400 M parameters)")
    p.add_argument("--tokenizer", default="", help="gpt2 (default), another that tiktoken knows, bytes (default for stdlib), neox:<tokenizer.json>")
    p.add_argument("--out_dir", default="", help="default data/<source>")
    p.add_argument("--max_tokens", type=count, default=10_000_000_000, help="training tokens, 0: all there are")
    p.add_argument("--val_tokens", type=count, default=0, help="validation: the first documents, until they reach it (default 10,485,760; local: 5%% of the bytes)")
    p.add_argument("--shard_tokens", type=count, default=100_000_000, help="a shard ends with the document that reaches it")
    p.add_argument("--num_workers", type=count, default=os.cpu_count(), help="tokenizer threads; the shards do not depend on it")
    args = p.parse_args(argv)
    args.tokenizer = args.tokenizer or ("bytes" if args.source == "stdlib" else "gpt2")
    args.name = args.name or ("sample-100BT" if args.source in HUB else "")
    out, hub = Path(args.out_dir or f"data/{Path(args.source).stem}"), HUB.get(args.source, args.source)
    enc = get_tokenizer(args.tokenizer)
    dtype = "uint16" if enc.n_vocab <= 65_535 else "uint32"
    files = [] if args.source in HUB else find_files(args.source)
    total = sum(path.stat().st_size for path in files)
    settings = {k: getattr(args, k) for k in ("source", "name", "tokenizer", "max_tokens", "val_tokens", "shard_tokens")}
    try:
        digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest() if files else None
        meta = earlier(out, {**settings, "hash": digest, "python": sys.version.split()[0], "vocab_size": enc.n_vocab, "dtype": dtype})
        if not meta["complete"]:
            if files:
                rows = read(lambda: file_rows(files, min(1 << 20, total // 100 + 1)), meta["place"], args.source, 0)
            else:
                data = lambda: load_dataset(hub, args.name or None, split="train", streaming=True, revision=meta["hash"])
                rows = ((place, (text_of(row, hub), True, 0)) for place, row in read(data, meta["place"], hub, 5))
            prepare(out, meta, encoded(rows, enc, dtype, min(max(1, args.num_workers), os.cpu_count())), total)
    except OSError as e:
        fail(f"{e.filename or out}: {e.strerror or e}")
    except KeyboardInterrupt:
        fail(f"{out}: interrupted; run again to go on behind the last whole shard", 130)
    train = [n for f, n in meta["tokens"].items() if f.startswith("train")]
    print(f"{out}: complete, {meta['documents']:,} documents, validation {meta['tokens']['val_000000.bin']:,} tokens, training {sum(train):,} tokens in {len(train)} shards, the last of {train[-1]:,}")
    return 0

if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as e:
        status = e.code
    sys.stdout.flush()
    os._exit(status) # the reader threads of datasets can keep a finished process alive
