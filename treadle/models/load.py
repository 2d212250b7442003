"""Load a causal language model and everything that must be known of it.

Guarantees: a model is either loaded whole, with every weight from its files, or refused with the
path and the next step; nothing of the directory is executed (`trust_remote_code=False`,
`weights_only`); the weights stay mapped to their file until they are written to, so that loading
costs little memory. A model directory must therefore be replaced by renaming, never edited.

Takes: a model's name (see catalog). Gives: LoadedModel, float32, eval mode, no gradients.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.errors import ModelError, boundary
from treadle.models import cache, catalog, files, hub
from treadle.models.quiet import quiet_transformers
from treadle.types import ModelShape, Provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    module: Any
    """The library's causal LM: float32, eval mode, `requires_grad` False everywhere."""
    tokenizer: Any
    stop_ids: tuple[int, ...]
    """Ids that end a turn; never empty. The one that the chat template writes comes first."""
    shape: ModelShape
    provenance: Provenance
    path: Path
    generation: dict[str, Any]
    """The model's own sampling defaults, for the record: we send every option ourselves."""
    template_sha256: str
    """Of the chat template's text."""


def load(spec: str, *, max_context: int) -> LoadedModel:
    """Load a known model, a local directory or a hub id.

    Args:
        max_context: tokens per sequence that are wanted; the model's own limit bounds them.

    Raises:
        ModelError: not found; config, tokenizer or weights missing or damaged; not a causal LM;
            needs code of its repository; no chat template; no stop id.
    """
    path = catalog.resolve(spec)
    config, architecture = _config(path)
    weights = files.weight_files(path)
    _check_weights(weights)
    tokenizer = _tokenizer(path)
    module = _module(path, config, architecture, weights)
    rows = module.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"{path}: the tokenizer has {len(tokenizer)} ids, the embedding only {rows} rows",
            hint="tokenizer and weights are of different models",
        )
    generation = module.generation_config.to_diff_dict() if module.generation_config else {}
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        stop_ids=stop_ids(path, tokenizer, generation.get("eos_token_id")),
        shape=_shape(module, max_context),
        provenance=provenance(path, weights),
        path=path,
        generation=generation,
        template_sha256=hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
    )


def load_tokenizer(spec: str) -> Any:
    """The tokenizer of a model alone. Raises ModelError as `load` does for it."""
    return _tokenizer(catalog.resolve(spec))


def tokenizer_sha256(tokenizer: Any) -> str:
    """Of the meaning of every id: two tokenizers with one hash read and write the same tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _config(path: Path) -> tuple[Any, str]:
    """The config and the name of the library's class for it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not (path / "config.json").is_file():
        held = ", ".join(sorted(p.name for p in path.iterdir())[:6]) or "nothing"
        hint = "a model is a Hugging Face directory: config.json, weights, tokenizer"
        if (path / "adapter_config.json").is_file():
            hint = "this is a LoRA adapter; pass its base model, or merge it (`treadle export`)"
        raise ModelError(f"{path}: no config.json; the directory holds {held}", hint=hint)
    raw = files.read_json(path / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"{path / 'config.json'}: has no `model_type`")
    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    classes = raw.get("architectures") or []
    if raw.get("auto_map") and expected is None:
        raise ModelError(
            f"{path}: `{kind}` needs Python code of its own repository, which is not run",
            hint="use a model that the installed transformers knows",
        )
    if expected is None or (classes and expected not in classes):
        found = ", ".join(map(str, classes)) or "no architecture"
        raise ModelError(
            f"{path}: not a causal language model: it is {found} of type `{kind}`"
            + (f", expected {expected}" if expected else ""),
            hint="use an instruct model with a `...ForCausalLM` architecture",
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{path}: the weights are quantised ({method}); they cannot be trained in float32",
            hint="use the model's unquantised version",
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return config, expected
    except Exception as error:
        raise ModelError(
            f"{path / 'config.json'}: not a valid `{kind}` config: {error}",
            hint="the file is damaged, or needs a newer transformers",
        ) from error


def _check_weights(weights: list[Path]) -> None:
    """Open every file; a truncated one fails here, with its name, and not deep in a library."""
    for path in weights:
        if path.suffix == ".bin":
            _check_pickle(path)
        else:
            _check_safetensors(path)


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as tensors:
            num_tensors = len(list(tensors.keys()))
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: not a whole safetensors file ({path.stat().st_size:,} bytes): {error}",
            hint="the copy or download was cut off; get the model again",
        ) from error
    if num_tensors == 0:
        raise ModelError(f"{path}: holds no tensors")


def _check_pickle(path: Path) -> None:
    import torch

    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise ModelError(
            f"{path}: a pickle that cannot be read as plain tensors was refused "
            f"({type(error).__name__}: {reason[:200]})",
            hint="convert it to safetensors where you trust it: save_pretrained(DIR)",
        ) from error


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in files.TOKENIZER_FILES):
        raise ModelError(
            f"{path}: no tokenizer ({', '.join(files.TOKENIZER_FILES[:2])} or another)",
            hint="save it beside the weights: tokenizer.save_pretrained(DIR)",
        )
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        raise ModelError(
            f"{path}: the tokenizer cannot be loaded: {type(error).__name__}: {error}",
            hint="its files are damaged or incomplete; get the model again",
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"{path}: the tokenizer has no chat template, so messages cannot be rendered",
            hint="use an instruct model, or put a chat_template.jinja into the directory",
        )
    return tokenizer


def _module(path: Path, config: Any, architecture: str, weights: list[Path]) -> Any:
    """The model with the tensors of exactly these files.

    Given the tensors, the library looks at no file of its own choice: no stray shard, no adapter
    that lies beside the model, no file that the config names.
    """
    import torch
    import transformers
    from safetensors.torch import load_file

    with boundary(ModelError, f"{path}: loading the weights"), quiet_transformers():
        tensors: dict[str, torch.Tensor] = {}
        for file in weights:
            if file.suffix == ".bin":
                tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            else:
                tensors |= load_file(file)
        loaded: Any = getattr(transformers, architecture).from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=torch.float32,
            output_loading_info=True,
        )
        module, report = loaded
        if (path / "generation_config.json").is_file():
            module.generation_config = transformers.GenerationConfig.from_pretrained(
                path, local_files_only=True
            )
    missing = sorted(map(str, report["missing_keys"]))
    wrong = sorted(str(key[0]) for key in report["mismatched_keys"])
    if missing or wrong:
        names = f"{len(missing)} missing, {len(wrong)} of the wrong shape"
        raise ModelError(
            f"{path}: the files do not hold all weights of the model: {names}, "
            f"first {(missing or wrong)[0]}",
            hint="config and weights are of different models, or a shard was left out",
        )
    return module.eval().requires_grad_(False)


def stop_ids(path: Path, tokenizer: Any, generation_eos: int | list[int] | None) -> tuple[int, ...]:
    """Every id that ends a turn: as the template writes it, as the configs declare it.

    Looking at the tokenizer's one eos alone makes finished answers look truncated.
    """
    declared = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    candidates = [_end_of_turn(path, tokenizer), *declared, tokenizer.eos_token_id]
    found = tuple(dict.fromkeys(i for i in candidates if i is not None))
    if not found:
        raise ModelError(
            f"{path}: nothing ends a turn: no eos_token_id, no eos token, and the chat template "
            "writes no token of its own after an assistant's message",
            hint="set eos_token_id in generation_config.json",
        )
    return found


def _end_of_turn(path: Path, tokenizer: Any) -> int | None:
    """The added token (special or not) that the chat template writes after an assistant's text."""
    mark = "the answer"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:
        raise ModelError(
            f"{path}: the chat template cannot render a user and an assistant message: {error}",
            hint="the template is damaged; get the model again, or replace chat_template.jinja",
        ) from error
    before, _, tail = text.rpartition(mark)
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"] if before else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def _shape(module: Any, max_context: int) -> ModelShape:
    config = module.config.get_text_config()
    heads = config.num_attention_heads
    hidden = config.hidden_size
    limit = getattr(config, "max_position_embeddings", None) or max_context
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    return ModelShape(
        family=module.config.model_type,
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
        vocab=embedding.weight.shape[0],
        tied=head is not None and head.weight.data_ptr() == embedding.weight.data_ptr(),
        parameters=sum(p.numel() for p in module.parameters()),
        max_context=min(max_context, limit),
    )


def provenance(path: Path, weights: list[Path]) -> Provenance:
    """Where a model directory came from: our record, the hub's cache, or the files themselves."""
    record = cache.record(path)
    if record.get("source"):
        return Provenance(
            source=str(record["source"]),
            license=str(record.get("license") or "unknown"),
            sha256=str(record.get("sha256", "")),
        )
    return Provenance(
        source=hub.revision(path) or f"local:{path}",
        license=_licence(path),
        sha256=files.sha256_of(weights),
    )


def _licence(path: Path) -> str:
    """The `license:` line of the model card's header; "unknown" without one."""
    card = path / "README.md"
    if not card.is_file():
        return "unknown"
    with card.open(encoding="utf-8", errors="replace") as lines:
        if next(lines, "").strip() != "---":
            return "unknown"
        for line in lines:
            if line.strip() == "---":
                break
            key, _, value = line.partition(":")
            if key == "license" and value.strip():
                return value.strip().strip("'\"")
    return "unknown"
