"""Makes tiny checkpoints of every decoder family, and what torch `transformers` computes on them.

The weights are a function of tensor name and shape, so that golden files need not hold them:
`python tests/models/make_models.py [CASE ...]` (needs torch) writes, for each case, the config that
`transformers` saved, the names and shapes of its tensors, logits, greedy tokens, gradient norms
and classifier scores to tests/golden/models/families/. All but `compute` works without torch.
"""

import json
import pathlib
import sys
import tempfile
import zlib

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "models" / "families"
# a vocabulary of a size that nothing else has, since `weight` knows embeddings by it
VOCAB, LENGTHS, STEPS = 67, (12, 7, 3), 8

# few different shapes, so that tests without jit find most primitives compiled
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 32}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_NEOX = _LLAMA | {"num_key_value_heads": None}


def _rope(kind, theta=10_000.0, **others):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **others}}


# case -> model type, labels of its classifier, and options, switched on so that they show
CASES = {
    "gpt2": ("gpt2", 2, _GPT),
    "gpt2_untied": (
        "gpt2",
        1,
        _GPT | {"tie_word_embeddings": False, "activation_function": "relu"},
    ),
    "gpt_neo": (
        "gpt_neo",
        1,
        {
            "hidden_size": 32,
            "num_layers": 3,
            "num_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 32,
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
            "window_size": 4,
        },
    ),
    "gptj": ("gptj", 1, _GPT | {"rotary_dim": 4}),
    "gptj_tied": ("gptj", 2, _GPT | {"rotary_dim": 8, "tie_word_embeddings": True}),
    "gpt_neox": (
        "gpt_neox",
        1,
        _NEOX | _rope("default", 500.0, partial_rotary_factor=0.5),
    ),
    "gpt_neox_sequential": (
        "gpt_neox",
        3,
        _NEOX
        | _rope("linear", factor=4.0, partial_rotary_factor=1.0)
        | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    "opt": (
        "opt",
        2,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "ffn_dim": 48,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
        },
    ),
    "opt_350m": (
        "opt",
        1,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "ffn_dim": 48,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 16,
        },
    ),
    "bloom": ("bloom", 1, {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gpt_bigcode": ("gpt_bigcode", 1, _GPT),
    "gpt_bigcode_multi_head": ("gpt_bigcode", 2, _GPT | {"multi_query": False}),
    "llama": (
        "llama",
        1,
        _LLAMA
        | _rope(
            "llama3", 100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16,
        )
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "llama_linear": (
        "llama",
        3,
        _LLAMA | _rope("linear", factor=2.0) | {"head_dim": 12, "tie_word_embeddings": True},
    ),
    "llama_dynamic": ("llama", 1, _LLAMA | _rope("dynamic", factor=4.0)),
    "llama_yarn": (
        "llama",
        1,
        _LLAMA
        | _rope("yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4.0)
        | {"num_key_value_heads": 1},
    ),
    "mistral": ("mistral", 1, _LLAMA | {"sliding_window": 5, "head_dim": 12}),
    "mixtral": (
        "mixtral",
        1,
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "qwen2": (
        "qwen2",
        1,
        _LLAMA
        | _rope("yarn", 1e6, factor=2.0, original_max_position_embeddings=16)
        | {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": (
        "qwen3",
        1,
        _LLAMA
        | {
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        1,
        _LLAMA
        | {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_sparse": (
        "qwen3_moe",
        2,
        _LLAMA
        | {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "gemma": ("gemma", 1, _LLAMA | {"head_dim": 12}),
    "gemma2": (
        "gemma2",
        1,
        _LLAMA
        | {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 4,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 15.0,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        3,
        _LLAMA
        | {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 4,
            "final_logit_softcapping": 20.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("phi3", 1, _LLAMA | {"sliding_window": 5, "num_key_value_heads": None}),
    "phi3_longrope": (
        "phi3",
        1,
        _LLAMA
        | {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
        | _rope(
            "longrope",
            short_factor=[1.0, 1.5],
            long_factor=[2.0, 8.0],
            partial_rotary_factor=0.5,
        ),
    ),
    "olmo2": ("olmo2", 1, _LLAMA | {"attention_bias": True}),
    "smollm3": (
        "smollm3",
        1,
        _LLAMA
        | {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "mlp_bias": True,
        },
    ),
}  # fmt: skip


def tokens(seed=0) -> list[np.ndarray]:
    """Three rows of real tokens, none of them a special one."""
    rng = np.random.RandomState(seed)
    return [rng.randint(3, VOCAB, n) for n in LENGTHS]


def padded(rows, side="right", width=LENGTHS[0] + STEPS) -> tuple[np.ndarray, np.ndarray]:
    """The rows in one grid, filled up with id 0 on one side, and its mask."""
    grid, mask = np.zeros((len(rows), width), int), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        cut = slice(None, len(row)) if side == "right" else slice(width - len(row), None)
        grid[i, cut], mask[i, cut] = row, True
    return grid, mask


def weight(name: str, shape, seed=0, centre=1.0) -> np.ndarray:
    """The tensor of that name: of a size at which it matters, and the same on every machine.

    `centre` is that of the scales of norms.
    """
    rng = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    noise = (rng.random_sample(shape) - 0.5) * 12**0.5
    if len(shape) == 1:
        values = 0.3 * noise + (0.0 if name.endswith("bias") else centre)
    elif VOCAB in shape:
        values = noise
    else:
        values = 0.25 * noise
    return values.astype(np.float32)


def write_checkpoint(folder, config: dict, shapes: dict, seed=0) -> None:
    """A checkpoint folder with the weights of `weight`."""
    centre = 0.0 if config["model_type"].startswith("gemma") else 1.0
    tensors = {name: weight(name, shape, seed, centre) for name, shape in shapes.items()}
    folder = pathlib.Path(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def write_golden(folder, case: str, classifier=False) -> dict[str, np.ndarray]:
    """A case's checkpoint (or its classifier's), and the arrays that torch computed on it."""
    kept = json.loads((GOLDEN / f"{case}.json").read_text())
    kind = "classifier" if classifier else "model"
    write_checkpoint(folder, kept[kind]["config"], kept[kind]["shapes"], kept["seed"])
    arrays = dict(np.load(GOLDEN / f"{case}.npz"))
    return arrays | {"grad_norms": kept["grad_norms"], "seed": kept["seed"]}


def compute(case: str, folder, seed=0) -> tuple[dict, dict[str, np.ndarray]]:
    """Computes a case with torch; leaves its checkpoint in `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind, labels, options = CASES[case]
    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options
    )
    folder = pathlib.Path(folder)

    def load(maker, **others):
        for key, value in others.items():
            setattr(config, key, value)
        maker.from_config(config).save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        shapes = {k: list(v.shape) for k, v in load_file(folder / "model.safetensors").items()}
        write_checkpoint(folder, saved, shapes, seed)
        model = maker.from_pretrained(folder, attn_implementation="eager").eval()
        return model.float(), {"config": saved, "shapes": shapes}

    rows = [torch.tensor(row)[None] for row in tokens(seed)]
    scorer, classifier = load(AutoModelForSequenceClassification, num_labels=labels)
    with torch.no_grad():
        scores = torch.cat([scorer(input_ids=row).logits for row in rows])
    model, language = load(AutoModelForCausalLM)
    greedy, margins = [], []
    with torch.no_grad():
        logits = torch.cat([model(input_ids=row).logits[0] for row in rows])
        # torch's own padded logits, as a check of the checker
        for side in ("right", "left"):
            grid, mask = padded(tokens(seed), side)
            inputs = {"input_ids": torch.tensor(grid), "attention_mask": torch.tensor(mask).long()}
            if kind != "bloom":
                inputs["position_ids"] = torch.tensor((mask.cumsum(1) - 1).clip(0))
            difference = model(**inputs).logits[torch.tensor(mask)] - logits
            assert difference.abs().max() < 1e-4, (case, side, difference.abs().max())
        for row in rows:
            for _ in range(STEPS):
                best = model(input_ids=row).logits[0, -1].topk(2)
                margins.append(float(best.values[0] - best.values[1]))
                row = torch.cat([row, best.indices[None, :1]], dim=1)
            greedy.append(row[0, -STEPS:].numpy())
    loss = torch.nn.functional.cross_entropy(
        model(input_ids=rows[0]).logits[0, :-1], rows[0][0, 1:]
    )
    loss.backward()
    with tempfile.TemporaryDirectory() as gradients:  # saved, so that they get checkpoint names
        for parameter in model.parameters():
            parameter.data.copy_(parameter.grad)
        model.save_pretrained(gradients)
        saved = load_file(pathlib.Path(gradients) / "model.safetensors")
    norms = {k: float(np.linalg.norm(v.astype(np.float64))) for k, v in saved.items()}
    arrays = {
        "logits": logits.numpy(),
        "scores": scores.numpy(),
        "greedy": np.stack(greedy).astype(np.int32),
        "margin": np.float32(min(margins)),
        "loss": np.float32(loss.item()),
    }
    return {
        "seed": seed, "model": language, "classifier": classifier, "grad_norms": norms,
    }, arrays  # fmt: skip


def main(cases):
    """Writes the golden files of these cases anew."""
    GOLDEN.mkdir(exist_ok=True)
    for case in cases:
        for seed in range(20):
            with tempfile.TemporaryDirectory() as folder:
                kept, arrays = compute(case, folder, seed)
            if arrays["margin"] > 0.02:  # else rounding could decide about a token
                break
        (GOLDEN / f"{case}.json").write_text(json.dumps(kept, sort_keys=True) + "\n")
        np.savez_compressed(GOLDEN / f"{case}.npz", **arrays)
        largest = np.abs(arrays["logits"]).max()
        print(f"{case:24} seed {seed} margin {arrays['margin']:.3f} logits up to {largest:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:] or CASES)
