"""Measure the held-out accuracy of a served checkpoint, per task, through its OpenAI-compatible endpoint.

    python configs/models/digits-vl/evaluate.py --base-url http://127.0.0.1:8000/v1 --model digits-vl

Three sets of `--samples` conversations each, about scans that training never saw:
- single digits, in images of every size;
- strips of one to six digits, in images of every size; digits count position by position;
- dialogues of up to four turns with up to four images, in which the served model's own answers form the history.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository's root, to import `configs`

from configs import dialogues, digits

SIZE_CLASSES = {"small": digits.SMALL_SIZES, "medium": digits.MEDIUM_SIZES, "large": digits.LARGE_SIZES}
Case = tuple[str, dialogues.Conversation]  # which set, and what to ask


def cases(samples: int, seed: int) -> Iterable[Case]:
    """The conversations of the three sets."""
    rng = np.random.default_rng(seed)
    held_out = digits.split("held_out")
    for i in range(samples):
        size = digits.SIZES[i % len(digits.SIZES)]
        scan = int(held_out[i % len(held_out)])
        scene = digits.Scene(digits.strip([scan], size, rng), digits.labels_of([scan]))
        question = dialogues.ASK_DIGIT[i % len(dialogues.ASK_DIGIT)]
        yield "single", dialogues.Conversation([dialogues.Turn("digit", question, scene.text, [scene])])
    for i in range(samples):
        sizes = list(SIZE_CLASSES.values())[i % 3]
        scene = digits.scene(rng, sizes, count=1 + i // 3 % digits.MAX_DIGITS)
        question = dialogues.ASK_READ[i % len(dialogues.ASK_READ)]
        yield "strip", dialogues.Conversation([dialogues.Turn("read", question, scene.text, [scene])])
    for _ in range(samples):
        yield "dialogue", dialogues.conversation(rng)


def size_class(image) -> str:
    """`small`, `medium` or `large`."""
    return next(name for name, sizes in SIZE_CLASSES.items() if image.size in sizes)


async def ask(client: AsyncOpenAI, model: str, talk: dialogues.Conversation) -> list[str]:
    """The served model's greedy answer to every turn, each with its own earlier answers as history."""
    answers: list[str] = []
    for turn in range(len(talk.turns)):
        reply = await client.chat.completions.create(
            model=model, messages=talk.messages(turn, answers), temperature=0, max_tokens=64
        )
        answers.append(reply.choices[0].message.content or "")
    return answers


def score(case: Case, answers: list[str]) -> Iterable[tuple[str, bool]]:
    """(row of the table, right or wrong) for everything that the answers tell."""
    name, talk = case
    for turn, answer in zip(talk.turns, answers, strict=True):
        if name == "dialogue":
            yield f"dialogue: {turn.task}", answer == turn.answer
            if turn.task == "compare":
                verdict, truth = (each.rpartition(":")[2] for each in (answer, turn.answer))
                yield "dialogue: compare, behind the counts", verdict == truth
            continue
        scene = turn.scenes[0]
        size = size_class(scene.image)
        if name == "single":
            yield "single digit", answer == turn.answer
            yield f"single digit, {size} image", answer == turn.answer
            continue
        yield "strip: whole answer", answer == turn.answer
        got = answer.split()
        for i, label in enumerate(scene.labels):
            right = i < len(got) and got[i] == str(label)
            yield "strip: digits", right
            yield f"strip: digits, {size} image", right
            yield f"strip: digits, {len(scene.labels)} in the strip", right


async def evaluate(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Accuracy and number of observations per row."""
    client = AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, timeout=600)
    gate = asyncio.Semaphore(args.concurrency)
    tally: dict[str, list[bool]] = defaultdict(list)
    work = list(cases(args.samples, args.seed))
    done = 0

    async def one(case: Case) -> None:
        nonlocal done
        async with gate:
            answers = await ask(client, args.model, case[1])
        for row, right in score(case, answers):
            tally[row].append(right)
        done += 1
        if done % 50 == 0:
            print(f"{done} of {len(work)} conversations", file=sys.stderr, flush=True)

    await asyncio.gather(*map(one, work))
    return {row: {"accuracy": float(np.mean(hits)), "number": len(hits)} for row, hits in sorted(tally.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="digits-vl")
    parser.add_argument("--api-key", default="none")
    parser.add_argument(
        "--samples", type=int, default=360, help="conversations per set; 360 covers every held-out scan"
    )
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    result = asyncio.run(evaluate(args))
    print("| held-out accuracy | right | of |\n|---|---|---|")
    for row, value in result.items():
        print(f"| {row} | {value['accuracy']:.1%} | {value['number']} |")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
