"""Train the demo checkpoint from scratch on two CPU cores and export it into this folder.

    python configs/models/digits-vl/train.py            # resumes where an earlier run stopped
    python configs/models/digits-vl/train.py --no-resume

The model learns from random conversations about strips of handwritten digits (`configs/digits.py`), drawn from the
1,437 training scans with augmentation; the loss covers the answers only. Every `--eval-every` steps it is measured on
conversations about the 360 held-out scans. One seed, one result (up to the order of floating-point sums).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear
from tqdm import tqdm
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from build import FOLDER, build_config, build_model, build_tokenizer, export
from configs import digits

IGNORE = -100  # label of a token without loss
POOL = 192  # conversations that are sorted by length into batches together
# Counts are few tokens beside those of the readings.
TASK_WEIGHTS = {"compare": 3.0, "count": 2.0}
# Sizes of the images in a conversation, its share, the most images it has. Small images teach the most per second.
SIZE_MIX = (
    (digits.SMALL_SIZES[:2], 0.3, 6),
    (digits.SMALL_SIZES, 0.35, 5),
    (digits.MEDIUM_SIZES, 0.15, 3),
    (digits.LARGE_SIZES, 0.13, 2),
    (digits.SIZES, 0.07, 3),
)


@dataclass
class Example:
    """One conversation as tokens.

    ids: token ids [L], image placeholders expanded; labels: [L], `IGNORE` outside the answers;
    answers: (task, start, end) of each answer in ids; pixels: [patches, 1536]; grids: [images, 3] in patches.
    """

    ids: list[int]
    labels: list[int]
    answers: list[tuple[str, int, int]]
    pixels: np.ndarray | None
    grids: np.ndarray | None


class Encoder:
    """Turns a conversation into an `Example`, exactly as a server's chat template and processor would."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.image_id = tokenizer.token_to_id("<|image_pad|>")
        settings = json.loads((FOLDER / "preprocessor_config.json").read_text())
        self.processor = Qwen2VLImageProcessorPil(**{k: v for k, v in settings.items() if not k.endswith("_type")})

    def __call__(self, talk: digits.Conversation) -> Example:
        images = [s.image for turn in talk.turns for s in turn.scenes]
        pixels = grids = None
        if images:
            processed = self.processor(images=images)
            pixels, grids = np.asarray(processed["pixel_values"]), np.asarray(processed["image_grid_thw"])
        embeddings = iter(grids.prod(1) // 4) if images else iter(())
        ids: list[int] = []
        labels: list[int] = []
        answers = []

        def add(text: str, learn: bool = False) -> None:
            for token in self.tokenizer.encode(text).ids:
                repeat = int(next(embeddings)) if token == self.image_id else 1
                ids.extend([token] * repeat)
                labels.extend([token if learn else IGNORE] * repeat)

        for text, task in pieces(talk):
            start = len(ids)
            add(text, learn=task is not None)
            if task:
                answers.append((task, start, len(ids)))
        return Example(ids, labels, answers, pixels, grids)


def pieces(talk: digits.Conversation) -> list[tuple[str, str | None]]:
    """The conversation in the chat template's form, cut into (text, None) and (answer, task)."""
    result: list[tuple[str, str | None]] = []
    head = f"<|im_start|>system\n{talk.system}<|im_end|>\n" if talk.system else ""
    for turn in talk.turns:
        images = "<|vision_start|><|image_pad|><|vision_end|>" * len(turn.scenes)
        content = images + turn.question if turn.images_first else turn.question + images
        result.append((f"{head}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n", None))
        result.append((f"{turn.answer}<|im_end|>", turn.task))
        head = "\n"
    return result


def vary(talk: digits.Conversation, rng: np.random.Generator) -> digits.Conversation:
    """Now and then, write the questions as people type them: without capitals or without the final sign."""
    for turn in talk.turns:
        if rng.random() < 0.15:
            turn.question = turn.question.lower()
        if rng.random() < 0.15:
            turn.question = turn.question.rstrip("?.!")
    return talk


def practice(rng: np.random.Generator, level: float) -> digits.Conversation:
    """An exercise of growing difficulty, `level` from 0 to 1; without such a start, nothing is learned for long.

    One digit of 64 pixels; then rows of up to six; then all but the large image sizes; then distorted scans and two
    questions of every kind. Above 1: large images, often with a single digit.
    """
    style = digits.Style(augment=level > 0.75, jitter=min(1.0, 0.3 + level))
    if 0.85 < level < 1:
        return digits.conversation(rng, digits.SMALL_SIZES, "train", style, images=1, turns=2, max_images=1)
    count = int(rng.integers(1, 2 + int(np.clip(20 * (level - 0.1), 0, 5))))
    count = 1 if level > 1 and rng.random() < 0.4 else count  # one digit is hard to find on a large ground
    sizes = digits.SMALL_SIZES + digits.MEDIUM_SIZES if level > 0.35 else [(64 * count, 64)]
    sizes = digits.LARGE_SIZES if level > 1 else sizes
    scene = digits.scene(rng, sizes, "train", style, count)
    questions = digits.ASK_DIGIT if count == 1 and level > 1 else digits.ASK_READ
    question = questions[int(rng.integers(len(questions)))]
    return digits.Conversation([digits.Turn("read", question, scene.text, [scene])])


def pointing(rng: np.random.Generator, level: float = 1.0) -> digits.Conversation:
    """An exercise in telling images apart: several questions about the n-th image, and comparisons.

    Two to six images of any sizes; below `level` 1 only small ones: two, from 0.4 also three, from 0.7 also four.
    Without such a concentrated start, guessing stays as good as anything for thousands of steps.
    Sizes must differ: among equal ones, the model would learn positions instead of counting images.
    """
    style = digits.Style(augment=True)
    if level < 1:
        number = int(rng.integers(2, 3 + (level > 0.4) + (level > 0.7)))
        sizes = digits.SMALL_SIZES[:5] if level < 0.7 else digits.SMALL_SIZES
    else:
        number = int(rng.choice([2, 3, 4, 5, 6], p=[0.4, 0.3, 0.2, 0.05, 0.05]))
        sizes = digits.SMALL_SIZES if rng.random() < 0.5 else digits.SMALL_SIZES + digits.MEDIUM_SIZES
        sizes = digits.SIZES if number < 4 and rng.random() < 0.2 else sizes
    talk = digits.Dialogue(rng, lambda: digits.scene(rng, sizes, "train", style))
    talk.first(number)
    while len(talk.turns) < number + 3:
        if rng.random() < 0.5:
            talk.ask_plain() if rng.random() < 0.3 else talk.ask_compare()
        else:
            talk.ask_nth(short=rng.random() < 0.3)
    return digits.Conversation(talk.turns)


def comparing(rng: np.random.Generator) -> digits.Conversation:
    """An exercise in the last word of a comparison: two to four small images, and whether more or fewer was asked."""
    talk = digits.Dialogue(rng, lambda: digits.scene(rng, digits.SMALL_SIZES, "train", digits.Style(augment=True)))
    attached = talk.attach(int(rng.choice([2, 3, 4], p=[0.4, 0.4, 0.2])))
    if not talk.ask_compare(attached):
        talk.ask_plain(attached)
    for _ in range(5):
        talk.ask_compare()
    return digits.Conversation(talk.turns)


def talk_of_any_kind(rng: np.random.Generator) -> digits.Conversation:
    """A conversation as they are measured, with more turns."""
    sizes, _, limit = SIZE_MIX[int(rng.choice(len(SIZE_MIX), p=[share for _, share, _ in SIZE_MIX]))]
    most, turns = int(rng.integers(1, limit + 1)), int(rng.integers(2, 8))
    style = digits.Style(augment=True)
    return digits.conversation(rng, sizes, "train", style, turns=turns, max_images=most, chat=0.03)


def training_pool(encode: Encoder, seed: int, pool: int, ramp: int, drill: int) -> list[Example]:
    """`POOL` examples from training scans.

    Reading exercises in the first `ramp` pools, exercises in telling images apart in the next `drill`, then everything.
    """
    rng = np.random.default_rng([seed, pool])
    examples = []
    for _ in range(POOL):
        draw = rng.random()
        if pool < ramp:
            talk = practice(rng, level=pool / ramp * rng.random() ** 0.5)
        elif pool < ramp + drill:
            talk = pointing(rng, (pool - ramp) / drill) if draw < 0.8 else practice(rng, level=rng.uniform(0.5, 1))
        elif draw < 0.2:
            talk = practice(rng, level=rng.uniform(0.5, 1.3))
        elif draw < 0.4:
            talk = comparing(rng)
        else:
            talk = pointing(rng) if draw < 0.65 else talk_of_any_kind(rng)
        examples.append(encode(vary(talk, rng)))
    return examples


def batches(examples: list[Example], budget: float, rng: np.random.Generator) -> list[list[Example]]:
    """Groups of similar length, each costing about `budget` (in text tokens of work), in random order."""
    groups: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda e: len(e.ids)):
        group = [*groups[-1], example]
        patches = sum(len(e.pixels) for e in group if e.pixels is not None)
        if groups[-1] and len(group) * len(example.ids) + 0.6 * patches > budget:
            groups.append([example])
        else:
            groups[-1] = group
    return [groups[i] for i in rng.permutation(len(groups))]


def collate(examples: list[Example], image_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right and stack: ids, labels, weights and masks [B, L], pixels [patches, 1536], grids [images, 3]."""
    longest = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    mask = torch.zeros_like(ids)
    weights = torch.ones(len(examples), longest)
    for i, e in enumerate(examples):
        ids[i, : len(e.ids)] = torch.tensor(e.ids)
        labels[i, : len(e.ids)] = torch.tensor(e.labels)
        mask[i, : len(e.ids)] = 1
        for task, begin, end in e.answers:
            weights[i, begin:end] = TASK_WEIGHTS.get(task, 1.0)
    batch = {"input_ids": ids, "labels": labels, "weights": weights, "attention_mask": mask}
    batch["mm_token_type_ids"] = ((ids == image_id) & (mask == 1)).int()
    if any(e.pixels is not None for e in examples):
        batch["pixel_values"] = torch.from_numpy(np.concatenate([e.pixels for e in examples if e.pixels is not None]))
        batch["image_grid_thw"] = torch.from_numpy(np.concatenate([e.grids for e in examples if e.grids is not None]))
    return batch


def weighted_loss(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens, by weight."""
    labels, weights = batch.pop("labels")[:, 1:], batch.pop("weights")[:, 1:]
    logits = model(**batch).logits[:, :-1]
    answered = labels != IGNORE
    losses = cross_entropy(logits[answered], labels[answered], reduction="none")
    return (losses * weights[answered]).sum() / weights[answered].sum()


def held_out(encode: Encoder, number: int, seed: int = 1) -> list[tuple[str, Example]]:
    """(size class, example) for `number` conversations about held-out scans, a third of each size class."""
    rng = np.random.default_rng(seed)
    classes = {"small": digits.SMALL_SIZES, "medium": digits.MEDIUM_SIZES, "large": digits.LARGE_SIZES}
    names = [list(classes)[i % 3] for i in range(number)]
    return [(name, encode(digits.conversation(rng, classes[name], max_images=3))) for name in names]


@torch.no_grad()
def accuracy(model, examples: list[tuple[str, Example]], encode: Encoder) -> dict[str, dict[str, float]]:
    """Share of right answers per task (whole answer; equals greedy decoding) and of right digits per size class.

    The digits' share is position by position, given the right earlier digits.
    """
    right: dict[str, list[float]] = defaultdict(list)
    model.eval()
    order = sorted(range(len(examples)), key=lambda i: len(examples[i][1].ids))
    for start in range(0, len(order), 8):
        group = [examples[i] for i in order[start : start + 8]]
        batch = collate([e for _, e in group], encode.image_id)
        predicted = model(**{k: v for k, v in batch.items() if k not in ("labels", "weights")}).logits.argmax(-1)
        for row, (size, example) in enumerate(group):
            for task, begin, end in example.answers:
                truth = torch.tensor(example.ids[begin:end])
                hit = predicted[row, begin - 1 : end - 1] == truth
                right[task].append(float(hit.all()))
                if task in ("digit", "read"):
                    right[f"{task}, {size} images"].append(float(hit.all()))
                    is_digit = [encode.tokenizer.id_to_token(t).isdigit() for t in truth.tolist()]
                    right[f"digits, {size} images"] += hit[torch.tensor(is_digit)].float().tolist()
    model.train()
    return {k: {"accuracy": float(np.mean(v)), "number": len(v)} for k, v in sorted(right.items())}


def learning_rate(step: int, steps: int, peak: float, warmup: int = 50) -> float:
    """Linear warm-up, then a cosine down to 1 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def report(model, encode: Encoder, number: int, step: int) -> dict:
    result = accuracy(model, held_out(encode, number), encode)
    tqdm.write(f"step {step}: " + "  ".join(f"{k} {v['accuracy']:.3f}" for k, v in result.items()))
    return result


def average_gradients(model) -> None:
    """The mean over the workers of every gradient, in one message."""
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


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
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)

    step, pool, seconds = 0, 0, 0.0
    saved = args.build / "checkpoint.pt"
    if args.resume and saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, pool, seconds = state["step"], state["pool"], state["seconds"]

    model.train()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # a batch without images leaves those of the vision encoder at zero
    start = time.monotonic() - seconds
    bar = tqdm(total=args.steps, initial=step, desc="train", mininterval=5, disable=rank > 0)
    loss_mean = None
    while step < args.steps:
        examples = training_pool(encode, args.seed, pool + rank, args.ramp, args.drill)
        budget = (args.budget if pool >= args.ramp * 0.5 else args.budget / 2) / args.workers
        mine = batches(examples, budget, np.random.default_rng([args.seed, pool + rank, 1]))
        number = torch.tensor(len(mine))
        dist.all_reduce(number, dist.ReduceOp.MIN)
        for group in mine[: min(int(number), args.steps - step)]:
            for g in optimizer.param_groups:
                g["lr"] = learning_rate(step, args.steps, args.lr)
            optimizer.zero_grad(set_to_none=False)
            loss = weighted_loss(model, collate(group, encode.image_id))
            loss.backward()
            average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            loss_mean = loss.item() if loss_mean is None else 0.95 * loss_mean + 0.05 * loss.item()
            bar.update()
            bar.set_postfix(loss=f"{loss_mean:.3f}", pool=pool, batch=len(group), refresh=False)
            if step % args.eval_every == 0 and rank == 0:
                report(model, encode, 60, step)
        pool += args.workers
        if rank == 0 and (pool // args.workers % args.save_every == 0 or step >= args.steps):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": step, "pool": pool, "seconds": time.monotonic() - start}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    bar.close()
    dist.destroy_process_group()
    if rank > 0:
        return

    minutes = (time.monotonic() - start) / 60
    export(model, tokenizer, args.out)
    exported = type(model).from_pretrained(args.out, dtype=torch.float32)
    result = report(exported, encode, args.final_samples, step)
    summary = {"minutes": round(minutes, 1), "steps": step, "conversations": pool * POOL, "held_out": result}
    (args.build / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8450)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--budget", type=float, default=2200.0, help="work per step, in text tokens")
    parser.add_argument("--ramp", type=int, default=100, help=f"pools of {POOL} reading exercises to begin with")
    parser.add_argument("--drill", type=int, default=60, help="pools of exercises in telling images apart after them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes, one CPU core each")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save-every", type=int, default=5, help="pools between two checkpoints")
    parser.add_argument("--eval-every", type=int, default=600, help="steps between two held-out measurements")
    parser.add_argument("--final-samples", type=int, default=900, help="held-out conversations measured at the end")
    parser.add_argument("--build", type=Path, default=FOLDER.parents[2] / "build" / "digits-vl", help="checkpoints")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the model goes")
    args = parser.parse_args()
    args.build = args.build.resolve()
    args.build.mkdir(parents=True, exist_ok=True)
    (args.build / "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(work, (args,), nprocs=args.workers)


if __name__ == "__main__":
    main()
