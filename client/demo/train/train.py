#!/usr/bin/env python3
"""Train the demo's hybrid language model on one GPU, or check its parallel forms against the plain recurrences.

    python3 prepare_text.py --out TEXT --excerpt ../text/heldout.txt
    python3 train.py --check                                   (any device; a minute or two on a CPU)
    python3 train.py --text TEXT --out ../weights/hybrid-kjv.safetensors --minutes 9

TEXT holds train.txt, valid.txt and heldout.txt. valid.txt chooses the checkpoint that is saved; heldout.txt is read once,
at the end, with the saved (bf16-rounded) weights in float32 arithmetic. Bits per byte: the text is cut into windows of a
given length, each starts from an empty state, and every byte but the first of the text is predicted exactly once.
"""
import argparse
import datetime
import json
import math
import random
import sys
import time
from pathlib import Path


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true",
                        help="compare the chunked with the sequential forms, and their gradients, in float64 and float32; no training")
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder with train.txt, valid.txt, heldout.txt (prepare_text.py makes it)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the .safetensors file to write")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps; the learning rate ends near 0 there (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0,
                        help="bound on the training time: the schedule is shortened to fit it (default %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=32768, help="bytes predicted in a step (default %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 1024, 1024, 4096],
                        help="sequence lengths; each step draws one of them (default %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up (default %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=1.5, help="AdamW's, on matrices alone (default %(default)s)")
    parser.add_argument("--byte-noise", type=float, default=0.05,
                        help="share of the input bytes replaced by bytes drawn from the text (targets are kept); falls to 0 "
                             "over the last fifth of the training (default %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="bound on the gradient's norm (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the initial weights and of the batches (default %(default)s)")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between validations (default %(default)s)")
    parser.add_argument("--tf32", action="store_true", help="TF32 for the recurrences' own matrix products while training")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model (slow to start)")
    parser.add_argument("--device", default="cuda", help="torch device (default %(default)s; --check falls back to cpu)")
    args = parser.parse_args()
    if not args.check and not (args.text and args.out):
        parser.error("give --text DIR and --out FILE, or --check")
    return args


def read_text(torch, path, device):
    try:
        data = path.read_bytes()
    except OSError as failure:
        sys.exit(f"train.py: cannot read {path}: {failure.strerror}; prepare_text.py writes it")
    return torch.tensor(list(data), dtype=torch.uint8, device=device)


def bits_per_byte(torch, model, text, length, batch_tokens=65536):
    """Mean of -log2 p(byte | the bytes before it in its window), over all of text but its first byte; text uint8 [N]."""
    model.eval()
    starts = list(range(0, len(text) - 1, length))
    full = [s for s in starts if s + length < len(text)]
    groups = [full[i:i + max(1, batch_tokens // length)] for i in range(0, len(full), max(1, batch_tokens // length))]
    total = 0.0
    with torch.no_grad():
        for group in groups + [[s] for s in starts[len(full):]]:
            rows = torch.stack([text[s:s + length + 1] for s in group]).long()
            logits = model(rows[:, :-1])
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), rows[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return total / math.log(2) / (len(text) - 1)


def check(torch, device):
    """Chunked against sequential: the three recurrences with strong and weak decays, then the whole model's gradients."""
    import model as m
    torch.manual_seed(0)
    failures = []

    def gap(a, b):
        """||a - b|| / ||b||; NaN never passes a limit."""
        return ((a.double() - b.double()).norm() / b.double().norm()).item()

    def report(name, value, limit):
        good = value < limit
        if not good:
            failures.append(name)
        print(f"{name:58} {value:.2e}  (limit {limit:.0e})  {'ok' if good else 'FAILED'}", flush=True)

    b, t = 2, 200                                                             # 200: three chunks of 64 and a part of one
    for kind, limit in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
        for name, g, h, dk, dv, channel in (("mamba2", 1, 4, 128, 64, False), ("gdn", 2, 4, 128, 64, False), ("kda", 2, 2, 128, 128, True)):
            for strength in (0.01, 1.0, 40.0):
                q, k = (torch.randn(b, t, g, dk, device=device, dtype=torch.float64) for _ in range(2))
                k[:, ::3] = k[:, :1]                                          # repeated keys: the solve's hard case
                v = torch.randn(b, t, h, dv, device=device, dtype=torch.float64)
                la = -strength * torch.rand(b, t, h, *([dk] if channel else []), device=device, dtype=torch.float64)
                beta = torch.rand(b, t, h, device=device, dtype=torch.float64)
                q, k = m.l2norm(q), m.l2norm(k)
                inputs = (q, k, v, la) + (() if name == "mamba2" else (beta,))
                seq = m.ssd_sequential if name == "mamba2" else m.delta_sequential
                par = {"mamba2": m.ssd_chunked, "gdn": m.gdn_chunked, "kda": m.kda_chunked}[name]
                got = par(*(x.to(kind) for x in inputs))
                report(f"{name} outputs, {str(kind)[6:]}, log decays to {-strength}", gap(got, seq(*inputs)), limit)
    tokens = torch.randint(0, 256, (2, 150), device=device)
    grads, logits = {}, {}
    for form, kind in (("sequential", torch.float64), ("chunked", torch.float64), ("chunked", torch.float32)):
        torch.manual_seed(1)
        net = m.HybridModel().to(device=device, dtype=kind)
        out = net(tokens[:, :-1], sequential=form == "sequential")
        torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        logits[form, kind], grads[form, kind] = out.detach(), {n: p.grad for n, p in net.named_parameters()}
    ref = ("sequential", torch.float64)
    for kind, limit in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        key = ("chunked", kind)
        report(f"model logits, {str(kind)[6:]}", gap(logits[key], logits[ref]), limit)
        gaps = {n: gap(g, grads[ref][n]) for n, g in grads[key].items()}
        name = max(gaps, key=lambda n: (gaps[n] != gaps[n], gaps[n]))
        report(f"worst gradient, {str(kind)[6:]}: {name}", gaps[name], limit)
    print(f"check: FAILED: {', '.join(failures)}" if failures else f"check: all passed on {device}")
    return 1 if failures else 0


def save(path, state, metadata):
    """Write the safetensors file; state's tensors already have the types that the file keeps."""
    from safetensors.torch import save_file
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, str(path), metadata=metadata)


def main():
    args = parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("train.py: PyTorch is missing; training needs torch 2.x, safetensors and a CUDA GPU; --check needs torch alone")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        if not args.check:
            sys.exit("train.py: PyTorch sees no CUDA GPU; --device cpu works, and takes days")
        args.device = "cpu"
    if args.check:
        torch.backends.cuda.matmul.allow_tf32 = False
        return check(torch, args.device)

    import model as m
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    text = {part: read_text(torch, args.text / f"{part}.txt", device) for part in ("train", "valid", "heldout")}
    net = m.HybridModel().to(device)
    parameters = sum(p.numel() for p in net.parameters())
    decayed = [p for n, p in net.named_parameters() if not m.is_f32(n)]
    plain = [p for n, p in net.named_parameters() if m.is_f32(n)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95), **({"fused": True} if device.type == "cuda" else {}))
    runner = torch.compile(net) if args.compile else net
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{parameters} parameters on {name}, torch {torch.__version__}; " + ", ".join(f"{k} {len(v)} bytes" for k, v in text.items()), flush=True)
    print("settings: " + json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}), flush=True)

    batches = torch.Generator(device=device).manual_seed(args.seed)
    choice = random.Random(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    start = last = time.monotonic()
    best, seen, step, done, running, count = (math.inf, None, 0), 0, 0, 0.0, torch.zeros((), device=device), 0

    def validate():
        torch.backends.cuda.matmul.allow_tf32 = False
        rounded = m.HybridModel().to(device)
        rounded.load_state_dict({n: (p if m.is_f32(n) else p.bfloat16().float()) for n, p in net.state_dict().items()})
        value = bits_per_byte(torch, rounded, text["valid"], 1024)
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        return value

    while done < 1.0:
        rate = args.lr * min(1.0, (step + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = choice.choice(args.lengths)
        rows = max(1, args.tokens_per_step // length)
        at = torch.randint(0, len(text["train"]) - length, (rows, 1), device=device, generator=batches)
        window = text["train"][at + torch.arange(length + 1, device=device)].long()
        inputs, targets = window[:, :-1], window[:, 1:]
        noise = args.byte_noise * min(1.0, (1.0 - done) / 0.2)
        if noise > 0:
            other = text["train"][torch.randint(0, len(text["train"]), inputs.shape, device=device, generator=batches)].long()
            inputs = torch.where(torch.rand(inputs.shape, device=device, generator=batches) < noise, other, inputs)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = runner(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip)
        optimizer.step()
        running += loss.detach()
        count, step, seen = count + 1, step + 1, seen + targets.numel()
        if step % 20 == 0 and device.type == "cuda":
            torch.cuda.synchronize()                                          # keep the clock below honest
        elapsed = time.monotonic() - start
        done = max(step / args.steps, elapsed / (60 * args.minutes))
        if step % 50 == 0 or done >= 1.0:
            mean, now = running.item() / count, time.monotonic()
            left = elapsed / done - elapsed
            print(f"step {step:5d}  loss {mean:.4f}  {mean / math.log(2):.4f} bits/byte  lr {rate:.1e}  "
                  f"{count * args.tokens_per_step / (now - last):8.0f} tokens/s  {max(0, left):4.0f} s left", flush=True)
            running.zero_()
            count, last = 0, now
        if step % args.eval_every == 0 or done >= 1.0:
            value = validate()
            if value < best[0]:
                best = (value, {n: p.detach().clone() for n, p in net.state_dict().items()}, step)
            print(f"step {step:5d}  validation {value:.4f} bits/byte (best {best[0]:.4f} at step {best[2]}), "
                  f"after {seen / len(text['train']):.1f} passes over the training text", flush=True)
            if not math.isfinite(value):
                sys.exit("train.py: the validation is not finite; a lower --lr may help")
            last = time.monotonic()
    trained = time.monotonic() - start

    # The best checkpoint, rounded, saved, read back, and measured in float32 arithmetic.
    torch.backends.cuda.matmul.allow_tf32 = False
    state = {n: p.contiguous() if m.is_f32(n) else p.to(torch.bfloat16).contiguous() for n, p in best[1].items()}
    save(args.out, state, {})
    from safetensors.torch import load_file
    net.load_state_dict({n: t.to(device=device, dtype=torch.float32) for n, t in load_file(str(args.out)).items()})
    bpb = {f"{part}_{length}": bits_per_byte(torch, net, piece, length)
           for part, piece in (("train", text["train"][:len(text["heldout"])]), ("valid", text["valid"]), ("heldout", text["heldout"]))
           for length in (1024, 4096)}
    metadata = {
        "format": "ssmd-hybrid-v1", "d_model": "256", "vocab": "256", "blocks": " ".join(m.BLOCKS), "mlp_hidden": "384",
        "conv_width": "4", "norm_eps": "1e-6", "tied_embedding": "true",
        "mamba2": "heads 4, d_v 64, groups 1, d_k 128; in_proj z 256, x 256, B 128, C 128, dt 4",
        "gdn": "groups 2, heads 4, d_k 128, d_v 64; in_proj q 256, k 256, v 256, z 256, a 4, b 4",
        "kda": "heads 2, d_k 128, d_v 128; in_proj q 256, k 256, v 256, z 256, b 2, f 32; f_proj 32 to 256",
        "attn": "heads 4, d 64; qkv_proj q 256, k 256, v 256; rope base 10000, rotate-half",
        "parameters": str(parameters), "text": "King James Bible (Debian bible-kjv-text), public domain; held out: 1 Thessalonians to Revelation",
        "train_tokens": str(seen), "best_step": str(best[2]), "steps": str(step), "train_seconds": f"{trained:.0f}", "seed": str(args.seed),
        "weight_decay": str(args.weight_decay), "byte_noise": str(args.byte_noise), "lr": str(args.lr),
        "heldout_bits_per_byte": f"{bpb['heldout_1024']:.4f}", "heldout_bits_per_byte_4096": f"{bpb['heldout_4096']:.4f}",
        "valid_bits_per_byte": f"{bpb['valid_1024']:.4f}", "train_bits_per_byte": f"{bpb['train_1024']:.4f}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__}
    save(args.out, state, metadata)
    print(f"saved {args.out}: step {best[2]} of {step}, {args.out.stat().st_size} bytes, trained {trained:.0f} s on {seen} tokens")
    print("saved weights in float32, bits per byte (train: its first " + f"{len(text['heldout'])} bytes): "
          + ", ".join(f"{k} {v:.4f}" for k, v in bpb.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
