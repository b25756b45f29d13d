#!/usr/bin/env python3
"""Write the reference that the C++ model is tested against, from the saved weights, sequentially and in float64.

    python3 golden.py --weights ../weights/hybrid-kjv.safetensors --text ../text/heldout.txt --out hybrid_golden.safetensors

The file holds tokens I32 [48] (a piece of the held-out text), logits F32 [48, 256] and hidden F32 [8, 256], the residual
stream after each block at the last token. The weights are the bf16-rounded ones of the file; only the results are
rounded to float32.
"""
import argparse
import sys
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="the .safetensors file that train.py wrote")
    parser.add_argument("--text", type=Path, required=True, help="the held-out text")
    parser.add_argument("--offset", type=int, default=18, help="where in the text the tokens start (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="number of tokens (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    args = parser.parse_args()
    try:
        import torch
        from safetensors.torch import load_file, save_file
    except ImportError as failure:
        sys.exit(f"golden.py: {failure.name} is missing; it needs torch and safetensors")
    import model as m

    piece = args.text.read_bytes()[args.offset:args.offset + args.tokens]
    if len(piece) != args.tokens:
        sys.exit(f"golden.py: {args.text} has no {args.tokens} bytes from {args.offset}")
    net = m.HybridModel()
    net.load_state_dict({n: t.float() for n, t in load_file(str(args.weights)).items()})
    net.double()
    tokens, hidden = torch.tensor([list(piece)], dtype=torch.int32), []
    with torch.no_grad():
        logits = net(tokens, sequential=True, hidden=hidden)[0]
        chunked = net(tokens)[0]
    gap = ((chunked - logits).norm() / logits.norm()).item()
    if not gap < 1e-9:
        sys.exit(f"golden.py: the chunked form is off by {gap:.1e}")
    save_file({"tokens": tokens[0].contiguous(), "logits": logits.float().contiguous(),
               "hidden": torch.stack([h[0, -1] for h in hidden]).float().contiguous()}, str(args.out),
              metadata={"text": piece.decode("ascii"), "arithmetic": "float64, sequential, from the bf16-rounded weights"})
    bits = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:].long()).item() / 0.6931471805599453
    print(f"{args.out}: {piece!r}, {bits:.4f} bits per byte over it, chunked form within {gap:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
