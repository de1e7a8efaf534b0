"""Everything of the checkpoint but its weights: architecture, tokenizer, chat template, processor settings.

`train.py` uses it; run alone, it writes the folder with untrained weights (enough to test that a server loads it).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[2]))  # the repository's root, to import `configs`

from configs import dialogues  # noqa: E402

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 512

# Splits text before byte-level merging: words with their leading space, single digits, punctuation, white space.
PRE_TOKENIZER = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

ENGLISH = """
The quick brown fox jumps over the lazy dog, and the dog does not mind at all. A server answers requests in the order
that its scheduler chooses; an image is encoded once, and its embeddings are kept until another image needs the space.
When was this written? It does not matter: what counts is that every letter, every sign and every common ending is seen.
"You can ask me something about the picture," she said. Then they went on reading, writing, testing and counting.
Because there are more words than tokens, most words are made of a few parts: in-, un-, re-, -ing, -tion, -able, -ness.
"""

CHAT_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type in ('video', 'video_url') -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif part.type == 'text' -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def phrases() -> list[str]:
    """Every sentence that the conversations can contain."""
    groups = (
        dialogues.ASK_DIGIT,
        dialogues.ASK_READ,
        dialogues.ASK_COUNT,
        dialogues.ASK_READ_NTH,
        dialogues.ASK_DIGIT_NTH,
        dialogues.ASK_COUNT_NTH,
        dialogues.ASK_MORE,
        dialogues.ASK_FEWER,
        dialogues.ASK_SAME_OF_THIS,
        dialogues.ASK_SAME_OF_NTH,
        dialogues.SYSTEM,
        [line for pair in dialogues.CHAT for line in pair],
    )
    sentences = [p.format(nth=nth) for group in groups for p in group for nth in (*dialogues.ORDINALS, "last")]
    return [*sentences, dialogues.NO_IMAGE, "equal", "system", "user", "assistant", *dialogues.ORDINALS]


def build_tokenizer():
    """Byte-level BPE of exactly `VOCAB_SIZE` tokens: any UTF-8 text goes in and comes out unchanged.

    The special tokens come last, as in Qwen's own tokenizers.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = phrases()
    tokenizer.train_from_iterator([*corpus, *(p.lower() for p in corpus), *ENGLISH.splitlines() * 8], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer


def build_config(tokenizer):
    """The architecture. Heads, vocabulary, MLP widths and the embeddings' total width divide by 16 ranks."""
    from transformers import Qwen3VLConfig

    ids = {t: tokenizer.token_to_id(t) for t in SPECIAL_TOKENS}
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        # 16 frequencies per head, shared out over time, height and width.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "model_type": "qwen3_vl_vision",
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 192,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2],
        "initializer_range": 0.05,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def build_model(config, seed: int = 0):
    """The untrained model, in fp32."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(config).float()


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def write_processor(folder: Path, tokenizer) -> None:
    """Tokenizer, chat template and processor settings, in the files that `transformers` and vLLM look for."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
            "model_max_length": 16384,
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
    )
    pixels = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "size": {"shortest_edge": 64 * 64, "longest_edge": 896 * 448},
        "processor_class": "Qwen3VLProcessor",
    }
    write_json(folder / "preprocessor_config.json", {**pixels, "image_processor_type": "Qwen2VLImageProcessor"})
    write_json(folder / "video_preprocessor_config.json", {**pixels, "video_processor_type": "Qwen3VLVideoProcessor"})


def export(model, tokenizer, folder: Path = FOLDER) -> None:
    """Write the whole folder; weights in bfloat16."""
    import copy

    import torch

    write_processor(folder, tokenizer)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.config.dtype = torch.bfloat16
    half.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    config = model.config.text_config
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": [config.eos_token_id, config.bos_token_id],
            "pad_token_id": config.pad_token_id,
            "do_sample": False,
        },
    )


if __name__ == "__main__":
    new_tokenizer = build_tokenizer()
    export(build_model(build_config(new_tokenizer)), new_tokenizer)
