"""What the service tells of its streams, as plain data that becomes JSON."""

from __future__ import annotations

import json
from typing import Any

from testtime.serve.store import Event, Snapshot


def audit_row(event: Event) -> dict[str, Any]:
    """A row of the audit log as plain data."""
    answer = json.loads(event.answer) if event.answer else {}
    return {
        "id": event.number,
        "kind": event.kind,
        "live": event.live,
        "time": event.time,
        "image": event.name,
        "sha256": event.sha256,
        "index": event.position if event.kind == "image" else None,
        "label": event.label,
        "zero_shot": event.zero_shot,
        "confidence": answer.get("confidence"),
        "entropy": event.entropy,
        "learned": event.learned,
        "reason": event.rule,
        "guard": answer.get("guard"),
        "thumbnail": event.thumbnail is not None,
        "detail": json.loads(event.detail) if event.detail else None,
    }


def snapshot_row(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": snapshot.id,
        "title": snapshot.title,
        "images": snapshot.images,
        "event": snapshot.number,
        "time": snapshot.time,
        "automatic": snapshot.automatic,
    }
