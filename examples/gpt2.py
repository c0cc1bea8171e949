"""Fine-tunes GPT-2 of Hugging Face as a pipeline, with the model's own classes and loss.

Without `--model`, a small GPT-2 with random weights reads Python's standard library byte by byte.
With it, a folder of `save_pretrained` gives the weights, and `--save` takes the trained model.
Needs `pip install transformers`.

    python examples/gpt2.py --stages 1
    torchrun --nproc-per-node 4 examples/gpt2.py --processes-per-replica 2

The second command trains two replicas of two stages, each stage in its own process.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import pipollux


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of a GPT-2 to begin with")
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--stages", type=int, default=2, help="stages of a replica")
    parser.add_argument("--processes-per-replica", type=int, help="1, or one for each stage")
    parser.add_argument("--batch-size", type=int, default=16, help="over all replicas")
    parser.add_argument("--texts", type=int, default=512, help="to train on")
    parser.add_argument("--length", type=int, default=64, help="of the longest text, in bytes")
    return parser.parse_args()


def read_texts(count: int, length: int) -> list[Tensor]:
    """Return pieces of the standard library of different lengths, as byte values."""
    library = Path(sysconfig.get_path("stdlib"))
    content = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    if not content:  # a Python in a zip file
        content = __doc__.encode() * count
    return [
        torch.tensor(list(content[n * length : (n + 1) * length - n % (length // 2)]))
        for n in range(min(count, len(content) // length))
    ]


def collate(texts: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Pad texts; return the model's inputs, and labels that are -100 for padding."""
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    ones = [torch.ones_like(text) for text in texts]
    mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)


def main() -> None:
    args = parse_arguments()
    pipollux.init_process_group(processes_per_replica=args.processes_per_replica)
    torch.manual_seed(0)
    if args.model is not None:
        gpt2 = GPT2LMHeadModel.from_pretrained(args.model)
    else:
        sizes = {"n_layer": 4, "n_head": 4, "n_embd": 64, "vocab_size": 256}
        gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    config, loss_function = gpt2.config, gpt2.loss_function

    texts = read_texts(args.texts, args.length)
    loader = pipollux.AdaptiveDataLoader(
        texts, batch_size=args.batch_size, shuffle=True, collate_fn=collate
    )
    optimizer = torch.optim.AdamW(gpt2.parameters(), lr=1e-3)
    model = pipollux.HybridParallel(
        gpt2, optimizer, num_stages=args.stages, example_inputs=collate(texts[:8])[0]
    )
    del gpt2  # holds the parameters of all stages

    def loss_of(output: Any, labels: Tensor) -> pipollux.WeightedLoss:
        total = loss_function(
            output.logits, labels, vocab_size=config.vocab_size, num_items_in_batch=1
        )
        return pipollux.WeightedLoss(total, (labels[:, 1:] != -100).sum())

    for epoch in pipollux.remaining_epochs_until(args.epochs):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = model.train_step(inputs, labels, loss_of)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            pipollux.report(loss=loss)
        if pipollux.process_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

    state = model.state_dict()  # of all stages, so all processes call it
    if args.save is not None and pipollux.process_rank() == 0:
        trained = GPT2LMHeadModel(config)
        trained.load_state_dict(state)
        trained.save_pretrained(args.save)


if __name__ == "__main__":
    main()
