"""What a corpus's manifest.json may say. scripts/prepare_data.py writes it; a copy may be damaged or a stranger's."""

from typing import Any

from forgetting_transformer.ranges import COUNT, Range, refusal

_ID = Range(0, COUNT.high)
_COUNTS = {"vocab_size": COUNT, "bos_token_id": _ID, "eos_token_id": _ID, "doc_len": COUNT}


def manifest_problem(manifest: Any) -> str | None:
    """What is wrong with the parts of a manifest that training reads; None if nothing is."""
    if not isinstance(manifest, dict):
        return f"it holds {_shown(manifest)}, not an object with keys"
    for key, allowed in _COUNTS.items():
        if key in manifest and (better := refusal(manifest[key], int, allowed)):
            return f"{key}={_shown(manifest[key])} must be {better}"
    entropy = manifest.get("unigram_entropy_nats")
    if better := refusal(entropy, float | None, Range(0, 64)):
        return f"unigram_entropy_nats={_shown(entropy)} must be {better}"
    arrays = manifest.get("arrays", {})
    if not isinstance(arrays, dict) or not all(isinstance(array, dict) for array in arrays.values()):
        return f"arrays={_shown(arrays)} must be an object of objects"
    for name, array in arrays.items():
        if (recorded := array.get("content_hash")) is not None and not isinstance(recorded, str):
            return f"arrays.{name}.content_hash={_shown(recorded)} must be text"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
