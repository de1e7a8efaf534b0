"""Train the demo checkpoint from scratch on two CPU cores and export it into this folder.

    python configs/models/digits-vl/train.py            # resumes where an earlier run stopped
    python configs/models/digits-vl/train.py --no-resume

Three lessons: the vision encoder learns to see digits (`look.py`); the text model learns to talk about what it sees,
while the encoder stays as it is; then both learn together from conversations of every kind (`lessons.py`). Scans come
from the 1,437 for training, distorted; the loss covers the answers, and which image each token is about (`refer.py`).
Now and then the model is measured on conversations about the 360 held-out scans. One seed, one result (up to the order
of floating-point sums).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear
from tqdm import tqdm

import lessons
from build import FOLDER, build_config, build_model, build_tokenizer, export
from configs import dialogues, digits
from encoding import IGNORE, TARGETS, Encoder, Example, collate
from look import Look, draw, share_read
from optimizers import Optimizers, learning_rate
from refer import Refer


@dataclass(frozen=True)
class Lesson:
    """`module`'s parameters learn from `batches`, at learning rates from the first of `rates` to the second."""

    name: str
    steps: int
    module: nn.Module
    batches: Callable[[np.random.Generator, float], Iterator[Any]]
    loss: Callable[[Any], torch.Tensor]
    report: Callable[[], str]
    rates: tuple[float, float]


def weighted_loss(model, refer: Refer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens, by weight, and of the images that they and the images' speak of."""
    labels, about, weights = (batch.pop(name) for name in TARGETS)
    labels, weights = labels[:, 1:], weights[:, 1:]
    hidden = model.model(**batch).last_hidden_state[:, :-1]
    answered = labels != IGNORE
    losses = cross_entropy(model.lm_head(hidden[answered]), labels[answered], reduction="none")
    return (losses * weights[answered]).sum() / weights[answered].sum() + refer.loss(about)


def held_out(encode: Encoder, number: int, seed: int = 1) -> list[tuple[str, Example]]:
    """(size class, example) for `number` conversations about held-out scans, a third of each size class."""
    rng = np.random.default_rng(seed)
    classes = {"small": digits.SMALL_SIZES, "medium": digits.MEDIUM_SIZES, "large": digits.LARGE_SIZES}
    names = [list(classes)[i % 3] for i in range(number)]
    return [(name, encode(dialogues.conversation(rng, classes[name], max_images=3))) for name in names]


@torch.no_grad()
def accuracy(model, examples: list[tuple[str, Example]], encode: Encoder) -> dict[str, dict[str, float]]:
    """Share of right answers per task (whole answer; equals greedy decoding) and of right digits per size class.

    The digits' share is position by position, given the right earlier digits.
    """
    right: dict[str, list[float]] = defaultdict(list)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i][1].ids))
    for start in range(0, len(order), 8):
        group = [examples[i] for i in order[start : start + 8]]
        batch = collate([e for _, e in group], encode.image_id)
        predicted = model(**{k: v for k, v in batch.items() if k not in TARGETS}).logits.argmax(-1)
        for row, (size, example) in enumerate(group):
            for task, begin, end in example.answers:
                truth = torch.tensor(example.ids[begin:end])
                hit = predicted[row, begin - 1 : end - 1] == truth
                right[task].append(float(hit.all()))
                if task in ("digit", "read"):
                    right[f"{task}, {size} images"].append(float(hit.all()))
                    is_digit = [encode.tokenizer.id_to_token(t).isdigit() for t in truth.tolist()]
                    right[f"digits, {size} images"] += hit[torch.tensor(is_digit)].float().tolist()
    return {k: {"accuracy": float(np.mean(v)), "number": len(v)} for k, v in sorted(right.items())}


def in_words(shares: dict[str, float]) -> str:
    return "  ".join(f"{name} {share:.3f}" for name, share in shares.items())


def plan(modules: nn.ModuleDict, encode: Encoder, args: argparse.Namespace) -> list[Lesson]:
    """The lessons in order. Every process takes its share of `args.budget`, the work per step in text tokens."""
    model, look, refer = modules["model"], modules["look"], modules["refer"]
    budget = args.budget / args.workers

    def draw_squares(rng: np.random.Generator, _done: float) -> Iterator[Any]:
        yield draw(encode, rng, int(budget / 1.5))

    def draw_talks(lesson) -> Callable[[np.random.Generator, float], Iterator[Any]]:
        return lambda rng, done: (
            collate(group, encode.image_id) for group in lessons.batches(encode, lesson, budget, rng, done)
        )

    def report_talks() -> str:
        measured = accuracy(model, held_out(encode, args.eval_samples), encode)
        return in_words({name: value["accuracy"] for name, value in measured.items()})

    def talks(name: str, steps: int, module: nn.Module, lesson, rates: tuple[float, float]) -> Lesson:
        return Lesson(
            name,
            steps,
            module,
            draw_talks(lesson),
            lambda batch: weighted_loss(model, refer, batch),
            report_talks,
            rates,
        )

    return [
        Lesson(
            "look",
            args.look_steps,
            look,
            draw_squares,
            look.loss,
            lambda: in_words(share_read(look, encode, rounds=max(1, args.eval_samples // 3))),
            (2 * args.lr, 0.01 * args.lr),
        ),
        talks("talk", args.talk_steps, refer, lessons.growing, (args.lr, 0.2 * args.lr)),
        talks("all", args.all_steps, nn.ModuleList([model, refer]), lessons.mixture, (0.2 * args.lr, 0.002 * args.lr)),
    ]


class Training:
    """Where a training stands: the lesson, the step in it, and the seconds that all of it took so far."""

    def __init__(self, modules: nn.ModuleDict, args: argparse.Namespace) -> None:
        self.modules = modules
        self.args = args
        self.saved = args.build / "checkpoint.pt"
        self.lesson = self.step = self.pool = 0
        self.start = time.monotonic()
        self.state: dict[str, Any] | None = None
        if args.resume and self.saved.exists():
            self.state = torch.load(self.saved, weights_only=True)
            modules.load_state_dict(self.state["modules"])
            self.lesson, self.step, self.pool = (self.state[k] for k in ("lesson", "step", "pool"))
            self.start -= self.state["seconds"]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def run(self, lesson: Lesson) -> None:
        rank = dist.get_rank()
        self.modules.requires_grad_(False)
        lesson.module.requires_grad_(True)
        optimizers = Optimizers(lesson.module.named_parameters(), self.args.lr)
        if self.state and self.state["optimizers"]:
            optimizers.load(self.state["optimizers"])
        self.state = None
        bar = tqdm(total=lesson.steps, initial=self.step, desc=lesson.name, mininterval=5, disable=rank > 0)
        loss_mean = None
        while self.step < lesson.steps:
            rng = np.random.default_rng([self.args.seed, self.lesson, self.pool, rank])
            self.pool += 1
            for batch in lesson.batches(rng, self.step / lesson.steps):
                optimizers.zero()
                loss = lesson.loss(batch)
                loss.backward()
                optimizers.step(learning_rate(self.step, lesson.steps, *lesson.rates))
                self.step += 1
                loss_mean = loss.item() if loss_mean is None else 0.95 * loss_mean + 0.05 * loss.item()
                bar.update()
                bar.set_postfix(loss=f"{loss_mean:.3f}", refresh=False)
                if self.step % self.args.eval_every == 0 and rank == 0:
                    tqdm.write(f"{lesson.name} {self.step} ({self.seconds:.0f} s): {lesson.report()}")
                if self.step % self.args.save_every == 0:
                    self.save(optimizers)
                if self.step == lesson.steps:
                    break
        bar.close()
        self.lesson, self.step, self.pool = self.lesson + 1, 0, 0
        self.save()

    def save(self, optimizers: Optimizers | None = None) -> None:
        """Write the checkpoint; without `optimizers`, a lesson is over."""
        states = optimizers.state() if optimizers else None
        if dist.get_rank() > 0:
            return
        state = {"modules": self.modules.state_dict(), "optimizers": states}
        state |= {"lesson": self.lesson, "step": self.step, "pool": self.pool, "seconds": self.seconds}
        torch.save(state, self.saved.with_suffix(".new"))
        self.saved.with_suffix(".new").replace(self.saved)


def work(rank: int, args: argparse.Namespace) -> None:
    """One of `args.workers` processes, of one thread each: every step, each takes a share of the batch.

    On small layers this is faster than threads that meet in every operation, above all on a busy machine.
    """
    dist.init_process_group("gloo", init_method=f"file://{args.build}/rendezvous", rank=rank, world_size=args.workers)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(build_config(tokenizer), args.seed)
    encode = Encoder(tokenizer)
    patches = model.model.visual.patch_embed
    patches.forward = lambda x: linear(x, patches.proj.weight.flatten(1), patches.proj.bias)  # faster than convolving

    look, refer = Look(model.model.visual, model.config.text_config.hidden_size), Refer(model.model.language_model)
    modules = nn.ModuleDict({"model": model, "look": look, "refer": refer})
    training = Training(modules, args)
    for lesson in plan(modules, encode, args)[training.lesson :]:
        training.run(lesson)
    dist.destroy_process_group()
    refer.close()
    if rank > 0:
        return

    minutes = training.seconds / 60
    export(model, tokenizer, args.out)
    exported = type(model).from_pretrained(args.out, dtype=torch.float32)
    result = accuracy(exported, held_out(encode, args.final_samples), encode)
    summary = {"minutes": round(minutes, 1), "held_out": result}
    (args.build / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--look-steps", type=int, default=1300, help="steps of the vision encoder alone")
    parser.add_argument("--talk-steps", type=int, default=1300, help="steps of the text model alone")
    parser.add_argument("--all-steps", type=int, default=850, help="steps of both together")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--budget", type=float, default=2200.0, help="work per step, in text tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes, one CPU core each")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save-every", type=int, default=250, help="steps between two checkpoints")
    parser.add_argument("--eval-every", type=int, default=400, help="steps between two held-out measurements")
    parser.add_argument("--eval-samples", type=int, default=90, help="held-out conversations measured meanwhile")
    parser.add_argument("--final-samples", type=int, default=600, help="held-out conversations measured at the end")
    parser.add_argument("--build", type=Path, default=FOLDER.parents[2] / "build" / "digits-vl", help="checkpoints")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the model goes")
    args = parser.parse_args()
    args.build = args.build.resolve()
    args.build.mkdir(parents=True, exist_ok=True)
    (args.build / "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(work, (args,), nprocs=args.workers)


if __name__ == "__main__":
    main()
