"""The Hugging Face hub and its local cache.

Guarantees: asking whether a model is in the cache uses no network; every request has a time
limit; weights are safetensors only, and no code of a repository is fetched. No torch.

Takes: a hub id such as "Qwen/Qwen3-0.6B". Gives: the directory of its snapshot.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

from treadle.errors import ModelError
from treadle.models import files

TIMEOUT_S = 5.0
"""Per request that carries no weights."""

_WANTED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "README.md",
    "LICENSE*",
)


def why_unreachable(timeout_s: float = TIMEOUT_S) -> str:
    """ "" when the hub answers, else the reason; one small request."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            return ""
    except (OSError, ValueError) as error:
        return f"{endpoint}: {getattr(error, 'reason', None) or error}"


def cached(hub_id: str) -> Path | None:
    """The snapshot in the local cache if it is complete."""
    import huggingface_hub

    try:
        config = huggingface_hub.try_to_load_from_cache(hub_id, "config.json")
    except huggingface_hub.errors.HFValidationError:
        return None
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    return snapshot if files.is_complete(snapshot) else None


def download(hub_id: str) -> Path:
    """Fetch what is missing of a model into the hub's cache; interrupted files are continued.

    Raises ModelError: no such model, access not granted, network or disk failure, no safetensors.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        path = huggingface_hub.snapshot_download(
            hub_id,
            allow_patterns=list(_WANTED),
            ignore_patterns=["*/*"],
            etag_timeout=TIMEOUT_S,
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{hub_id}: its owner must grant access first",
            hint=f"accept the terms at https://huggingface.co/{hub_id} and set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{hub_id}: the hub has no such model, or it is private",
            hint="check the spelling; for a private model set HF_TOKEN",
        ) from error
    except Exception as error:
        raise ModelError(
            f"{hub_id}: download failed: {type(error).__name__}: {error}",
            hint="run the command again: finished files are kept",
        ) from error
    snapshot = Path(path)
    files.weight_files(snapshot)
    return snapshot


def revision(path: Path) -> str:
    """ "hf:ORG/NAME@COMMIT" when the path lies in a hub cache, else ""."""
    parts = path.parts
    for i, part in enumerate(parts[:-2]):
        if part.startswith("models--") and parts[i + 1] == "snapshots":
            return f"hf:{part.removeprefix('models--').replace('--', '/')}@{parts[i + 2]}"
    return ""
