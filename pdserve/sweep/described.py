"""What a reader sees of the points of a sweep: what is the same at all of them once, and what varies. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.sweep.points import Point, Settings, Variant, by_deployment


def letter(index: int) -> str:
    """A to Z, then A1 and so on."""
    turn, place = divmod(index, 26)
    return f"{chr(ord('A') + place)}{turn or ''}"


def letters(points: Sequence[Point]) -> Mapping[Variant, str]:
    """A short name of each deployment, in the order of the points."""
    return {deployment: letter(index) for index, (deployment, _) in enumerate(by_deployment(points))}


def constant_settings(points: Sequence[Point]) -> Settings:
    """Keys of the recipe that every deployment sets to the same value; of a single deployment, all that it sets."""
    every = [point.deployment.settings for point in points]
    return tuple(pair for pair in (every[0] if every else ()) if all(pair in settings for settings in every))


def varied(deployment: Variant, constant: Settings) -> str:
    """What of its settings is not the same everywhere."""
    own = [f"{key}={value}" for key, value in deployment.settings if (key, value) not in constant]
    return ", ".join(own) or "the recipe as it is"


def constant_work(points: Sequence[Point]) -> tuple[str, ...]:
    """Prompts and repeats, where all points have the same."""
    works, repeats = {point.work for point in points}, {point.workload.repeats for point in points}
    same = [next(iter(works))] if len(works) == 1 else []
    return (*same, *([f"repeats {next(iter(repeats))}"] if len(repeats) == 1 else []))
