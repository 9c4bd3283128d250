"""
Text -> token shards for train.py.

    python prepare_fineweb.py                                FineWeb-Edu, streamed from the hub, GPT-2 tokens
    python prepare_fineweb.py --source stdlib                the running Python's own library, bytes: no network, seconds
    python prepare_fineweb.py --source "books/*.txt"         .txt, .jsonl, .parquet: a file, a folder or a glob

Writes val_000000.bin, train_000000.bin ... and meta.json. A shard: 256 int32 (magic, version, count), then uint16 ids as in
llm.c, or uint32. One end-of-text token before every document. Killed and run again, it ends with the same bytes.
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
import threading
import time
import unicodedata
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import requests
import tiktoken
from tqdm import tqdm

SOURCES = {"fineweb_edu": ("HuggingFaceFW/fineweb-edu", "sample-100BT", "gpt2"), "fineweb": ("HuggingFaceFW/fineweb", "sample-100BT", "gpt2"),
           "stdlib": ("stdlib", "", "bytes")} # -> name on the hub, configuration, tokenizer
HEADER = {"uint16": (20240520, 1), "uint32": (20240801, 7)} # -> magic, version

def fail(message, code=1): # as in train.py, which needs torch
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)

def patient(f, url):
    # f(); without a network tiktoken and the hub wait for long, so after 2 s url must answer, or requests raises
    future = Future()
    def work():
        try:
            future.set_result(f())
        except Exception as e:
            future.set_exception(e)
    threading.Thread(target=work, daemon=True).start()
    if not wait([future], 2).done:
        requests.head(url, timeout=4)
    return future.result()

def load_dataset(*args, **kwargs):
    import datasets, huggingface_hub # slow
    huggingface_hub.utils.logging.set_verbosity_error() # not every retry
    return patient(lambda: datasets.load_dataset(*args, **kwargs), datasets.config.HF_ENDPOINT)

# -----------------------------------------------------------------------------
# Tokenizers

def neox(path):
    # GPT-NeoX's tokenizer.json: byte-level BPE, GPT-2's pattern, ids in merge order; runs of spaces are taken out before BPE
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    if (spec["normalizer"]["type"], spec["pre_tokenizer"]["type"]) != ("NFC", "ByteLevel"):
        raise ValueError("not like GPT-NeoX's")
    special = {t["content"]: t["id"] for t in spec["added_tokens"]}
    runs = {t: special.pop(t) for t in list(special) if not t.strip(" ")}
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)] # bytes written as themselves, the others as U+0100 and up
    byte = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*plain}))}
    ranks = {bytes(map(byte.get, word)): i for word, i in spec["model"]["vocab"].items() if word not in special}
    run = "|".join(sorted(runs, key=len, reverse=True)) or "(?!)"
    pattern = rf"{run}|'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|(?:(?!{run})\s)+(?!\S)|(?:(?!{run})\s)+"
    enc = tiktoken.Encoding("neox", pat_str=pattern, mergeable_ranks=ranks | {t.encode(): i for t, i in runs.items()}, special_tokens=special)
    ordinary = enc.encode_ordinary
    enc.encode_ordinary = lambda text: ordinary(unicodedata.normalize("NFC", text))
    return enc

def get_tokenizer(name):
    # "bytes", "neox:<tokenizer.json>" or a name that tiktoken knows -> tiktoken.Encoding
    if name == "bytes":
        return tiktoken.Encoding(name, pat_str="(?s).{1,64}", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={"<|endoftext|>": 256})
    try:
        return neox(name[5:]) if name.startswith("neox:") else patient(lambda: tiktoken.get_encoding(name), "https://openaipublic.blob.core.windows.net")
    except requests.RequestException as e:
        fail(f"--tokenizer: {name} cannot be downloaded; with a network run TIKTOKEN_CACHE_DIR=tok python -c \"import tiktoken; tiktoken.get_encoding('{name}')\", "
             f"bring tok here (it keeps {e.request.url} as {hashlib.sha1(e.request.url.encode()).hexdigest()}) and set TIKTOKEN_CACHE_DIR to it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        fail(f"--tokenizer: {name}: {type(e).__name__} {str(e).splitlines()[0]}; known: bytes, neox:<tokenizer.json>, {', '.join(tiktoken.list_encoding_names())}")

def encode(enc, text, first, dtype):
    # runs of 4,096 characters are cut: tiktoken's time grows with their square, and a million spaces overflow its stack
    parts = re.split(r"(\S{4096}|\s{4096})", text) if len(text) > 20_000 else [text]
    return np.array([enc.eot_token] * first + [i for part in parts for i in enc.encode_ordinary(part)], dtype)

# -----------------------------------------------------------------------------
# Rows: ({"text": ...} or what stands in its place, does a document begin here, bytes of the source)

def find_files(source):
    # the files of a local source in a fixed order; none: a name on the hub
    root, suffixes = Path(source), (".txt", ".jsonl", ".parquet")
    if source == "stdlib":
        root, skip = Path(sysconfig.get_path("stdlib")), {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        files = [p.relative_to(root) for p in root.rglob("*") if p.suffix in (".py", ".rst", ".txt")]
        return [root / p for p in sorted(files, key=lambda p: hashlib.sha256(p.as_posix().encode()).digest()) if not skip & {*p.parts}]
    paths = root.rglob("*") if root.is_dir() else map(Path, glob.glob(source, recursive=True) or [root])
    files = sorted((p for p in paths if p.suffix in suffixes and p.is_file()), key=Path.as_posix)
    if not files and (root.exists() or root.suffix in suffixes):
        fail(f"--source: {source}: no .txt, .jsonl or .parquet file there")
    return files

def file_rows(path, limit):
    size, jsonl, first, decoder = path.stat().st_size, path.suffix == ".jsonl", True, codecs.getincrementaldecoder("utf-8-sig")()
    if path.suffix == ".parquet":
        from pyarrow.parquet import read_metadata
        cost = size / max(1, read_metadata(path).num_rows)
        yield from ((row, True, cost) for row in load_dataset("parquet", data_files=glob.escape(str(path)), split="train", streaming=True))
        return
    with open(path, "rb") as f: # by hand: datasets stops at a broken line, and does not say which byte is not UTF-8
        for n, piece in enumerate(iter(f.readline if jsonl else lambda: f.read(limit) + f.readline(limit), b""), 1):
            try:
                text = decoder.decode(piece, jsonl or f.tell() >= size).replace("\r\n", "\n")
                row = {"text": text} if not jsonl else json.loads(text) if text.strip() else {"text": ""}
            except UnicodeDecodeError as e:
                where = f"{path} byte {f.tell() - len(e.object) + e.start}"
                row = ValueError("not UTF-8", where) if jsonl else fail(f"--source: {where}: not UTF-8; convert the file first")
            except (ValueError, RecursionError):
                row = ValueError("not JSON", f"{path} line {n}")
            yield row, first, len(piece) # a .txt is one document, in pieces: memory stays small, and validation can end inside it
            first = jsonl or first and not text.strip()

def defect(row, first):
    # why a row is left out
    if not isinstance(row, dict) or "text" not in row:
        return row.args[0] if isinstance(row, ValueError) else f"without text (fields: {', '.join(row) if isinstance(row, dict) else ''})"
    return "null" if row["text"] is None else "not a string" if not isinstance(row["text"], str) else "empty" if first and not row["text"].strip() else ""

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
                    yield place, row if isinstance(row, tuple) else (row, True, 0)
            return
        except Exception as e: # a long stream breaks now and then, with a dozen kinds of errors
            why = f"{source}: {type(e).__name__}: {' '.join(str(e).split())[:300]}"
            failures += 1
            if failures > tries:
                fail(f"--source: {why}; run again to go on, or without a network use --source stdlib or local files")
            print(f"note: {why}; try {failures} of {tries}", file=sys.stderr)
            time.sleep(2 ** failures)

def encoded(rows, enc, dtype, workers):
    # (place, row, future ids) in the order of the rows; tiktoken frees the GIL, so threads do; few are in flight: memory is bounded
    with ThreadPoolExecutor(workers) as pool:
        flight = []
        for place, row in rows:
            flight.append((place, row, None if defect(*row[:2]) else pool.submit(encode, enc, row[0]["text"], row[1], dtype)))
            if len(flight) > 8 * workers:
                yield flight.pop(0)
        yield from flight

# -----------------------------------------------------------------------------
# Shards

def earlier(out, settings):
    # meta.json as of the last whole shard of an earlier run in out, or a fresh one
    fresh = {**settings, "complete": False, "place": 0, "read": 0, "documents": 0, "skipped": {}, "tokens": {}}
    try:
        meta = json.loads((out / "meta.json").read_text(encoding="utf-8")) if (out / "meta.json").exists() else fresh
        kinds = dict(complete=bool, read=(int, float), documents=int, skipped=dict, tokens=dict)
        right = fresh.keys() <= meta.keys() and all(isinstance(meta[k], kind) for k, kind in kinds.items())
        right = right and all(isinstance(n, int) for n in (*meta["skipped"].values(), *meta["tokens"].values())) and all(re.fullmatch(r"\w+\.bin", f) for f in meta["tokens"])
        if not right:
            raise ValueError
        sizes = {f: 1024 + n * np.dtype(meta["dtype"]).itemsize for f, n in meta["tokens"].items()}
    except (ValueError, TypeError, AttributeError):
        fail(f"{out / 'meta.json'}: damaged, or not of this program; delete {out} or choose another --out_dir")
    if len(sizes) < 2: # no training shard yet
        return fresh
    wrong = [f"was prepared with {k} {meta[k]}, not {v}" for k, v in settings.items() if meta[k] != v]
    wrong += [f"lacks {f} of {n:,} bytes" for f, n in sizes.items() if not (out / f).is_file() or (out / f).stat().st_size != n]
    return fail(f"--out_dir: {out} {wrong[0]}; choose another or delete it") if wrong else meta

def prepare(out, meta, rows, total):
    # rows: (place, row, future ids) behind meta["place"]; total: bytes of a local source, 0: the hub
    goal, pieces, size, skipped = meta["max_tokens"] or sys.maxsize, [], 0, meta["skipped"]
    val_tokens, val_bytes = meta["val_tokens"] or 10_485_760, 0.05 * total if total and not meta["val_tokens"] else sys.maxsize
    trained = sum(list(meta["tokens"].values())[1:])
    def write(name, *parts): # under a temporary name until it is whole
        (out / f"{name}.tmp").write_bytes(b"".join(parts))
        (out / f"{name}.tmp").replace(out / name)
    def save():
        if size:
            name = f"train_{len(meta['tokens']) - 1:06d}.bin" if meta["tokens"] else "val_000000.bin"
            write(name, np.array([*HEADER[meta["dtype"]], size] + [0] * 253, "<i4"), *pieces)
            meta["tokens"][name] = size
        write("meta.json", json.dumps(meta, indent=1).encode())
    out.mkdir(parents=True, exist_ok=True)
    save()
    bar = tqdm(total=total or meta["max_tokens"] or None, initial=meta["read"] if total else trained, unit="B" if total else "tok", unit_scale=True, disable=None)
    for meta["place"], (row, first, cost), ids in rows:
        meta["read"] += cost
        bar.update(cost)
        if why := defect(row, first):
            skipped[why] = skipped.get(why, 0) + 1
            if isinstance(row, ValueError) and skipped[why] == 1:
                bar.write(f"note: {row.args[1]}: {why}, left out", file=sys.stderr)
            if not meta["documents"] and skipped[why] == 1000:
                break
            continue
        training = bool(meta["tokens"])
        ids = ids.result()[:goal - trained if training else None]
        trained += len(ids) * training
        pieces.append(ids)
        size += len(ids)
        meta["documents"] += first
        bar.update(0 if total else len(ids) * training)
        if trained >= goal:
            break
        if size >= meta["shard_tokens"] if training else size >= val_tokens or meta["read"] >= val_bytes:
            save()
            pieces, size = [], 0
    bar.total = bar.n # full, wherever the text ended
    bar.close()
    print(f"skipped {sum(skipped.values()):,}:", ", ".join(f"{n:,} {why}" for why, n in skipped.items()) or "all is text")
    if not trained:
        fail(f"--source: {meta['source']}: {meta['documents']:,} documents of {sum(meta['tokens'].values()) + size:,} tokens in all, too few for training beside validation")
    meta["complete"] = True
    save()

def count(text):
    if not 0 <= float(text) < 2**63:
        raise ValueError # argparse names the flag and the value
    return int(float(text))

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
    hub, name, tokenizer = SOURCES.get(args.source, (args.source, "", "gpt2"))
    name, tokenizer, out = args.name or name, args.tokenizer or tokenizer, Path(args.out_dir or f"data/{Path(args.source).stem}")
    enc, files = get_tokenizer(tokenizer), [] if hub != args.source else find_files(args.source)
    dtype = "uint16" if enc.n_vocab <= 65_535 else "uint32"
    try:
        total = sum(path.stat().st_size for path in files)
        digest = hashlib.sha256(b"".join(hashlib.file_digest(open(path, "rb"), "sha256").digest() for path in files)).hexdigest()
        meta = earlier(out, dict(
            source=args.source, name=name, hash=digest if files else None, python=sys.version.split()[0] if args.source == "stdlib" else None,
            tokenizer=tokenizer, vocab_size=enc.n_vocab, dtype=dtype, max_tokens=args.max_tokens, val_tokens=args.val_tokens, shard_tokens=args.shard_tokens))
        if not meta["complete"]:
            limit = min(1 << 20, total // 100 + 1)
            data = lambda: (row for path in files for row in file_rows(path, limit)) if files else load_dataset(hub, name or None, split="train", streaming=True)
            rows = read(data, meta["place"], args.source, 0 if files else 5)
            prepare(out, meta, encoded(rows, enc, dtype, min(args.num_workers, os.cpu_count()) or 1), total)
    except OSError as e:
        fail(f"{e.filename or out}: {e.strerror or e}")
    except KeyboardInterrupt:
        fail(f"{out}: interrupted; run again to go on behind the last whole shard", 130)
    val, *train = meta["tokens"].values()
    print(f"{out}: complete, {meta['documents']:,} documents, {val:,} validation tokens, {sum(train):,} training tokens in {len(train)} shards, {train[-1]:,} in the last")
    return 0

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace") # a path that the terminal's encoding lacks
    status = main()
    sys.stdout.flush()
    os._exit(status) # the reader threads of datasets can keep a finished process alive
