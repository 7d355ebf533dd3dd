"""Makes embedded policies: a small Qwen3 (or DeepSeek-V3) with random weights, trained on
demonstrations.

The project's own trainer trains the policy on right demonstrations, then on careless ones. Such a
policy can give the right answer, but rarely does, so reinforcement learning quickly improves it.
Everything is seeded, but on another machine or with another number of threads, rounding may differ.

The tokenizer has one token for each word of a task, and bytes for all other text. It is a
byte-level BPE without merges: a piece of text that is not in the vocabulary becomes its UTF-8
bytes, so every text can be encoded and decoded unchanged. The special tokens are Qwen3's, which
`renderers` and vLLM's parsers of tool calls need.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from torchtitan_rl import (
    ChatRenderer,
    Episode,
    Message,
    OptimizerConfig,
    TrainerConfig,
    pack_episodes,
)

Family = Literal["qwen3", "deepseek_v3"]
Demonstrate = Callable[[int, bool, random.Random], Episode]
"""Makes the demonstration with a number (from 0). If the second argument is True, the demonstration
is careless: mistakes are drawn at random."""


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Options of every program that makes an embedded policy."""

    output_dir: Path
    seed: int = 0
    right_steps: int = 700  # steps on right demonstrations
    careless_steps: int = 150  # steps on demonstrations with mistakes
    decay_steps: int = 350  # the last steps, in which the learning rate falls to 0
    demonstrations_per_step: int = 32
    learning_rate: float = 3e-3
    threads: int = 1
    row_len: int = 256  # maximum tokens of a demonstration


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a Qwen3 with tied embeddings and two query heads for each key-value head, or of
    a DeepSeek-V3 whose layers but the first have experts."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int = 64
    max_positions: int = 1024
    family: Family = "qwen3"


def warm_start(
    config: WarmStart,
    tokenizer: Any,
    size: ModelSize,
    demonstrate: Demonstrate,
    *,
    write: Callable[..., None] | None = None,
) -> None:
    """Train from random weights, and write the policy (bfloat16). ``write`` writes the random
    weights in place of `write_untrained`, for other families."""
    from torchtitan_rl import PolicyTrainer

    num_steps = config.right_steps + config.careless_steps
    trainer_config = TrainerConfig(
        max_episode_tokens=config.row_len,
        max_tokens_per_microbatch=32 * config.row_len,
        threads=config.threads,
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate, warmup_steps=50, decay_steps=config.decay_steps
        ),
    )
    rng = random.Random(config.seed)
    per_step = config.demonstrations_per_step
    with tempfile.TemporaryDirectory() as folder:
        untrained = Path(folder) / "untrained"
        (write or write_untrained)(untrained, tokenizer, size, seed=config.seed)
        trainer = PolicyTrainer(untrained, trainer_config, seed=config.seed, max_steps=num_steps)
        for step in range(num_steps):
            is_careless = step >= config.right_steps
            numbers = range(step * per_step, (step + 1) * per_step)
            episodes = [demonstrate(number, is_careless, rng) for number in numbers]
            packing = pack_episodes(episodes, row_len=config.row_len, temperature=1.0)
            if packing.batch is None or packing.oversized:
                raise ValueError(f"a demonstration is longer than a row ({config.row_len} tokens)")
            output = trainer.supervised_step(packing.batch)
            if step % 50 == 0 or step == num_steps - 1:
                print(f"step {step}: loss {output.metrics['loss']:.3f}", flush=True)
        trainer.export_hf(config.output_dir, dtype="bfloat16")
        trainer.close()


def demonstration(
    name: str,
    turns: Sequence[tuple[Sequence[Message], str]],
    *,
    renderer: ChatRenderer,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Episode:
    """Make an episode of a conversation. Each turn has the messages before an answer, and the
    answer; the loss is on the answers."""
    end = tokenizer.eos_token_id
    token_ids: tuple[int, ...] = ()
    mask: list[bool] = []
    spoken: tuple[int, ...] = ()
    for messages, answer in turns:
        if not token_ids:
            prompt: tuple[int, ...] | None = renderer.initial_prompt(messages, tools)
        else:
            prompt = renderer.extend(token_ids[: -len(spoken)], spoken, messages)
        if prompt is None:
            raise ValueError(f"{name}: the renderer cannot extend the conversation by {messages}")
        spoken = (*tokenizer.encode(answer, add_special_tokens=False), end)
        mask += [False] * (len(prompt) - len(mask)) + [True] * len(spoken)
        token_ids = prompt + spoken
    return imitated(name, token_ids, mask)


def imitated(name: str, token_ids: Sequence[int], mask: Sequence[bool]) -> Episode:
    """Make an episode with loss on the tokens for which ``mask`` is True."""
    zeros = (0.0,) * len(token_ids)
    return Episode(
        rollout_id=name,
        group_id=name,
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        logprobs=zeros,
        advantages=zeros,
        versions=tuple(0 if sampled else -1 for sampled in mask),
    )


_DEEPSEEK_V3: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def write_untrained(path: Path, tokenizer: Any, size: ModelSize, *, seed: int) -> None:
    """Write a Hugging Face directory with random weights and the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    if size.family == "qwen3":
        more = {"num_key_value_heads": size.num_heads // 2, "head_dim": size.head_dim}
    else:
        more = _DEEPSEEK_V3 | {
            "num_key_value_heads": size.num_heads,
            "moe_intermediate_size": size.intermediate_size // 2,
            "qk_nope_head_dim": size.head_dim // 2,
            "qk_rope_head_dim": size.head_dim // 2,
            "v_head_dim": size.head_dim,
            "q_lora_rank": size.hidden_size // 2,
            "kv_lora_rank": size.hidden_size // 2,
        }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            size.family,
            vocab_size=len(tokenizer),
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            max_position_embeddings=size.max_positions,
            rope_theta=10_000.0,
            tie_word_embeddings=size.family == "qwen3",
            **more,
            initializer_range=0.06,  # the usual 0.02 is for wide models; this one learns faster
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT_TOKENS = (  # they stay in a text when special tokens are skipped
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def build_word_backend(covered_text: str, *, piece: str) -> Tokenizer:
    """Build a tokenizer whose ids are bytes first, then words, then special tokens.

    ``piece`` is a regular expression for the pieces into which a text is cut. Every piece of
    ``covered_text`` becomes a token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # one character for each byte
    words = [_in_byte_alphabet(text) for text in sorted(set(re.findall(piece, covered_text)))]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *words]))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(piece), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False) for token in _TEXT_TOKENS])
    return backend


def with_chat_template(backend: Tokenizer, chat_template: str) -> Any:
    """Build the `transformers` tokenizer of a policy."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _in_byte_alphabet(piece: str) -> str:
    """Write a piece in the alphabet of byte-level BPE: one printable character per byte."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in splitter.pre_tokenize_str(piece))
