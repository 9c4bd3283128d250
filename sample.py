"""
Text from a checkpoint, on any device, as long as you like: behind block_size the window of the last block_size tokens moves on.

    python sample.py out/my_run --prompt "Once upon a time" --max_new_tokens 500 --temperature 0.8 --top_k 200
"""
import argparse
import codecs
import sys
from pathlib import Path

import torch

from prepare_fineweb import get_tokenizer
from train import fail, load_checkpoint, own_tokenizer

@torch.no_grad()
def generate(model, enc, ids, max_new_tokens, temperature=1.0, top_k=0, generator=None):
    # yields the ids that follow the ids given, until end-of-text. No cache: the whole window is computed again for every token
    device = model.wte.weight.device
    for _ in range(max_new_tokens):
        x = model.trunk(torch.tensor([ids[-model.config.block_size:]], device=device)) # (1, T, C)
        logits = model.head(x[:, -1:])[0][0, 0, :enc.n_vocab].float() # (V), without the rows that pad the vocabulary
        if top_k:
            logits[logits < logits.topk(min(top_k, enc.n_vocab)).values[-1]] = -torch.inf
        if temperature == 0:
            token = logits.argmax().item()
        else:
            p = torch.softmax((logits - logits.max()) / temperature, dim=-1) # (V)
            token = torch.multinomial(p, 1, generator=generator).item()
        if token == enc.eot_token:
            return
        ids = ids + [token]
        yield token

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.error = lambda message: fail(message.removeprefix("argument "), 2)
    p.add_argument("run", help="run directory or ckpt.pt")
    p.add_argument("--prompt", default="", help="empty: the beginning of a document")
    p.add_argument("--prompt_file", default="", help="read the prompt from a UTF-8 file")
    p.add_argument("--max_new_tokens", type=int, default=500)
    p.add_argument("--num_samples", type=int, default=1)
    p.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    p.add_argument("--top_k", type=int, default=200, help="only the k likeliest tokens, 0: all")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tokenizer", default="", help="default: the checkpoint's")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args(argv)
    sys.stdout.reconfigure(errors="replace")
    for name in ("temperature", "top_k"):
        if not getattr(args, name) >= 0:
            fail(f"--{name}: {getattr(args, name)} is negative")
    model, ckpt = load_checkpoint(args.run)
    enc = get_tokenizer(args.tokenizer or own_tokenizer(ckpt))
    if enc.n_vocab > model.config.vocab_size:
        fail(f"--tokenizer: {enc.name} has {enc.n_vocab} tokens, the model {model.config.vocab_size}")
    try:
        prompt = Path(args.prompt_file).read_text(encoding="utf-8") if args.prompt_file else args.prompt
    except (OSError, UnicodeDecodeError) as e:
        fail(f"--prompt_file: {args.prompt_file}: {e}")
    try:
        model, generator = model.to(args.device), torch.Generator(args.device).manual_seed(args.seed)
    except (RuntimeError, AssertionError, ValueError) as e:
        fail(f"--device: {args.device}, --seed {args.seed}: {str(e).splitlines()[0]}")
    for i in range(args.num_samples):
        print("---\n" * (i > 0) + prompt, end="", flush=True)
        decoder = codecs.getincrementaldecoder("utf-8")("replace") # a token may hold half a character
        for token in generate(model, enc, [enc.eot_token] + enc.encode_ordinary(prompt), args.max_new_tokens, args.temperature, args.top_k, generator):
            try:
                text = decoder.decode(enc.decode_single_token_bytes(token))
            except KeyError: # an id that the tokenizer never uses
                text = "\ufffd"
            print(text, end="", flush=True)
        print(decoder.decode(b"", True))
    return 0

if __name__ == "__main__":
    sys.exit(main())
