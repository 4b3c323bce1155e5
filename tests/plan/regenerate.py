"""Writes tests/golden anew: python -m tests.plan.regenerate. What changed is for the diff, and for a human, to say."""

from __future__ import annotations

from tests.plan import container_golden, shapes
from tests.plan.golden import BATCH_SCRIPT, FOLDER, RECIPES, batch_script, golden_files


def main() -> None:
    """Writes the files of all recipes, layouts and containers, removes those that are gone, and slurm/disagg.sh."""
    shipped = {path: text for name in RECIPES for path, text in golden_files(name).items()}
    wanted = {**shipped, **shapes.golden_files(), **container_golden.golden_files()}
    for folder in (FOLDER, shapes.FOLDER, container_golden.FOLDER):
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path not in wanted:
                path.unlink()
    BATCH_SCRIPT.write_text(batch_script())
    for path, text in wanted.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
