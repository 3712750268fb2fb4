"""When each op of a timeline ran."""

from __future__ import annotations

from hocket.core.timelines.timeline import Timeline


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Start and end by op."""
    return {str(span.op): (span.start_s, span.end_s) for span in timeline.spans}
