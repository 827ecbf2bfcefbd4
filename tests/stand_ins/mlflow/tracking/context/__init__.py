"""What a run knows of its surroundings."""


def resolve_tags(tags: dict[str, str] | None) -> dict[str, str]:
    """Return the tags of a run."""
    return dict(tags or {})
