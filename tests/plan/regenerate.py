"""Writes tests/golden anew: python -m tests.plan.regenerate. What changed is for the diff, and for a human, to say."""

from __future__ import annotations

from tests.plan import container_golden
from tests.plan.golden import BATCH_SCRIPT, FOLDER, RECIPES, batch_script, golden_files


def main() -> None:
    """Writes the files of all shipped recipes, removes those of recipes that are gone, and writes slurm/disagg.sh."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {path: text for name in RECIPES for path, text in golden_files(name).items()}
    for path in FOLDER.iterdir():
        if path not in wanted:
            path.unlink()
    container_golden.FOLDER.mkdir(exist_ok=True)
    BATCH_SCRIPT.write_text(batch_script())
    for path, text in {**wanted, **container_golden.golden_files()}.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
