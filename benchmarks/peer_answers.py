"""Greedy answers of one server, recorded, and compared with those of another.

    python benchmarks/peer_answers.py record  --base-url http://127.0.0.1:9000/v1 --model m --file answers.json
    python benchmarks/peer_answers.py compare --base-url http://127.0.0.1:8000/v1 --model digits-vl --file answers.json

The prompts are seeded: mixed tasks, image sizes from 64x64 to 896x448, one to six images, one to four turns with the
expected answers as history. `compare` exits with status 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs import dialogues

MAX_TOKENS = 32


def prompts(number: int, seed: int) -> list[dict]:
    """Each prompt: `messages`, the `expected` answer, the `task`, the images' sizes, a digest of the messages."""
    result = []
    for i in range(number):
        rng = np.random.default_rng([seed, i])
        talk = dialogues.conversation(rng, images=1 + i % 4 if i % 8 else 6, turns=1 + i // 4 % 4, max_images=6)
        messages = talk.messages()
        last = talk.turns[-1]
        result.append(
            {
                "messages": messages,
                "task": last.task,
                "question": last.question,
                "sizes": [s.image.size for turn in talk.turns for s in turn.scenes],
                "turns": len(talk.turns),
                "expected": last.answer,
                "digest": hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16],
            }
        )
    return result


def answers(args: argparse.Namespace, asked: list[dict]) -> list[str]:
    """The server's greedy answers, in order."""
    client = OpenAI(base_url=args.base_url, api_key="none", timeout=600)

    def ask(prompt: dict) -> str:
        reply = client.chat.completions.create(
            model=args.model, messages=prompt["messages"], temperature=0, max_tokens=MAX_TOKENS
        )
        return reply.choices[0].message.content or ""

    with ThreadPoolExecutor(args.concurrency) as pool:
        return list(pool.map(ask, asked))


def record(args: argparse.Namespace) -> int:
    asked = prompts(args.number, args.seed)
    rows = [
        {**{k: v for k, v in prompt.items() if k != "messages"}, "answer": answer}
        for prompt, answer in zip(asked, answers(args, asked), strict=True)
    ]
    data = {"seed": args.seed, "number": args.number, "max_tokens": MAX_TOKENS, "rows": rows}
    args.file.write_text(json.dumps(data, indent=1) + "\n")
    right = sum(row["answer"] == row["expected"] for row in rows)
    print(f"{len(rows)} answers recorded in {args.file}; {right} are the expected ones")
    return 0


def compare(args: argparse.Namespace) -> int:
    data = json.loads(args.file.read_text())
    asked = prompts(data["number"], data["seed"])
    for prompt, row in zip(asked, data["rows"], strict=True):
        if prompt["digest"] != row["digest"]:
            raise SystemExit(
                "the prompts differ from the recorded ones: other images, or another version of the drawing"
            )
    different = 0
    for i, (row, answer) in enumerate(zip(data["rows"], answers(args, asked), strict=True)):
        if answer != row["answer"]:
            different += 1
            print(f"prompt {i} ({row['task']}, {row['question']!r}): {answer!r}, recorded {row['answer']!r}")
    print(f"{len(asked) - different} of {len(asked)} answers equal the recorded ones")
    return int(different > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", default="digits-vl")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--number", type=int, default=50, help="prompts to record")
    parser.add_argument("--seed", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    sys.exit({"record": record, "compare": compare}[args.action](args))


if __name__ == "__main__":
    main()
